// What the skin knows about one op: its ports, attributes and dimension rules (generated, op_table.inc) and the two functions
// that lead to the kernel (bindings.cpp). Nothing here depends on the op; adding one is a table entry and a binding.
#pragma once

#include "trt_api.h"

#include <cstdint>
#include <string>
#include <vector>

namespace glm
{

// Version and namespace under which TensorRT finds the ops; the exporter writes them into every node.
#if !defined(GLM_PLUGIN_VERSION)
#define GLM_PLUGIN_VERSION "1"
#endif
constexpr char kPluginVersion[] = GLM_PLUGIN_VERSION;
constexpr char kPluginNamespace[] = "glm";

enum class Type
{
    kActivation,        // bf16
    kActivationOrFloat, // output: f32 when the attribute to_f32 is 1, else bf16
    kCache,             // bf16, or int8 holding packed fp8 rows
    kBfloat16,
    kBool,
    kFloat,
    kFloat8,
    kInt8,
    kInt32,
    kInt64,
    kUint8,
};

enum class Kind
{
    kInt,
    kFloat,
    kInts,
};

struct Port
{
    char const* name;
    Type type;
    std::vector<char const*> dimensions; // postfix expressions, see dimensions.h
    int alias;                           // outputs: the input that this output is, updated in place; -1 = none
};

struct Attribute
{
    char const* name;
    Kind kind;
};

// value = (extent of `axis` of input `slot` - offset) / scale
struct Symbol
{
    char const* name;
    int slot;
    int axis;
    int scale;
    int offset;
};

struct OpRecord
{
    char const* name;
    std::vector<Port> inputs;
    std::vector<Port> outputs;
    std::vector<Attribute> attributes;
    std::vector<Symbol> symbols;
};

// Value of one attribute; `number` for kInt and kFloat, `list` for kInts.
struct AttributeValue
{
    double number = 0;
    std::vector<int32_t> list;
};

class Call;

// Bytes of scratch memory for the shapes of the call, which has no pointers then.
using WorkspaceFunction = size_t (*)(Call const&);
// Enqueue the kernels of the call. 0, a cudaError_t, or a negative status of glm_kernels/status.h.
using EnqueueFunction = int (*)(Call const&);

struct Binding
{
    char const* name;
    WorkspaceFunction workspace; // null: none needed
    EnqueueFunction enqueue;
};

struct Op
{
    OpRecord const* record;
    Binding const* binding;

    int input(char const* name) const;
    int attribute(char const* name) const;
};

// Every op of the table with its binding, in table order. Throws when the two lists disagree.
std::vector<Op> const& ops();

// One binding per op; defined in bindings.cpp.
std::vector<Binding> const& bindings();

} // namespace glm
