// Evaluates the dimension rules of op_table.inc, over numbers (checks at run time) and over TensorRT's expressions (shape
// inference at build time). A rule is postfix text such as "O 128 ceil": integers, names, + - * / ceil max.
#pragma once

#include "op.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace glm
{

// Arithmetic over int64_t.
struct Numbers
{
    using Value = int64_t;
    Value constant(int64_t value) const { return value; }
    Value apply(std::string const& op, Value a, Value b) const
    {
        if (op == "+") return a + b;
        if (op == "-") return a - b;
        if (op == "*") return a * b;
        if (op == "max") return std::max(a, b);
        if (b <= 0) throw std::runtime_error("division by " + std::to_string(b) + " in a dimension rule");
        if (op == "/") return a / b;
        return (a + b - 1) / b; // ceil
    }
};

// Arithmetic over TensorRT's dimension expressions.
struct Expressions
{
    using Value = nvinfer1::IDimensionExpr const*;
    nvinfer1::IExprBuilder& builder;

    Value constant(int64_t value) const { return builder.constant(value); }
    Value apply(std::string const& op, Value a, Value b) const
    {
        using nvinfer1::DimensionOperation;
        DimensionOperation const operation = op == "+" ? DimensionOperation::kSUM
            : op == "-"                                ? DimensionOperation::kSUB
            : op == "*"                                ? DimensionOperation::kPROD
            : op == "max"                              ? DimensionOperation::kMAX
            : op == "/"                                ? DimensionOperation::kFLOOR_DIV
                                                       : DimensionOperation::kCEIL_DIV;
        return builder.operation(operation, *a, *b);
    }
};

// `extent(slot, axis)` gives an input's dimension in the algebra; `attribute(index)` an int attribute.
template <typename Algebra, typename Extent, typename AttributeInt>
typename Algebra::Value evaluate(
    char const* rule, Op const& op, Algebra const& algebra, Extent const& extent, AttributeInt const& attribute)
{
    std::vector<typename Algebra::Value> stack;
    std::istringstream words(rule);
    std::string word;
    auto name = [&](std::string const& text) -> typename Algebra::Value {
        int const index = op.attribute(text.c_str());
        if (index >= 0)
        {
            return algebra.constant(attribute(index));
        }
        for (Symbol const& symbol : op.record->symbols)
        {
            if (text == symbol.name)
            {
                auto value = extent(symbol.slot, symbol.axis);
                if (symbol.offset != 0) value = algebra.apply("-", value, algebra.constant(symbol.offset));
                if (symbol.scale != 1) value = algebra.apply("/", value, algebra.constant(symbol.scale));
                return value;
            }
        }
        throw std::logic_error("dimension rule '" + std::string(rule) + "' names unknown '" + text + "'");
    };
    while (words >> word)
    {
        if (std::isdigit(static_cast<unsigned char>(word[0])))
        {
            stack.push_back(algebra.constant(std::atoll(word.c_str())));
        }
        else if (std::isalpha(static_cast<unsigned char>(word[0])) && word != "ceil" && word != "max")
        {
            stack.push_back(name(word));
        }
        else
        {
            if (stack.size() < 2) throw std::logic_error("dimension rule '" + std::string(rule) + "' lacks an operand");
            auto const b = stack.back();
            stack.pop_back();
            stack.back() = algebra.apply(word, stack.back(), b);
        }
    }
    if (stack.size() != 1) throw std::logic_error("dimension rule '" + std::string(rule) + "' leaves no single value");
    return stack.back();
}

} // namespace glm
