#include "op.h"

#include <cstring>
#include <stdexcept>

namespace glm
{
namespace
{

std::vector<OpRecord> const& records()
{
    static std::vector<OpRecord> const table = {
#include "op_table.inc"
    };
    return table;
}

std::vector<Op> joined()
{
    std::vector<Op> out;
    for (OpRecord const& record : records())
    {
        Binding const* found = nullptr;
        for (Binding const& binding : bindings())
        {
            if (std::strcmp(binding.name, record.name) == 0)
            {
                found = &binding;
            }
        }
        if (found == nullptr)
        {
            throw std::logic_error(std::string("op ") + record.name + " has no binding in bindings.cpp");
        }
        out.push_back({&record, found});
    }
    if (out.size() != bindings().size())
    {
        throw std::logic_error("bindings.cpp binds an op that op_table.inc does not have");
    }
    return out;
}

template <typename Item>
int indexOf(std::vector<Item> const& items, char const* name)
{
    for (size_t i = 0; i < items.size(); ++i)
    {
        if (std::strcmp(items[i].name, name) == 0)
        {
            return static_cast<int>(i);
        }
    }
    return -1;
}

} // namespace

int Op::input(char const* name) const
{
    return indexOf(record->inputs, name);
}

int Op::attribute(char const* name) const
{
    return indexOf(record->attributes, name);
}

std::vector<Op> const& ops()
{
    static std::vector<Op> const table = joined();
    return table;
}

} // namespace glm
