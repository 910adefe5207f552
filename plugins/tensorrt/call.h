// One invocation as an adapter sees it: shapes, attributes and, when enqueued, pointers. Names are those of the op table.
#pragma once

#include "op.h"

#include <stdexcept>

namespace glm
{

class Call
{
public:
    Op const* op = nullptr;
    std::vector<AttributeValue> const* attributes = nullptr;
    nvinfer1::PluginTensorDesc const* inputDescs = nullptr;
    nvinfer1::PluginTensorDesc const* outputDescs = nullptr;
    void const* const* inputs = nullptr;  // null while the workspace is sized
    void* const* outputs = nullptr;       // likewise
    void* workspace = nullptr;
    size_t workspaceBytes = 0;
    cudaStream_t stream = nullptr;
    bool building = false; // a builder times the op; its inputs hold anything

    // Extent of an axis of the input or output in slot `slot`.
    int in(int slot, int axis) const { return static_cast<int>(inputDescs[slot].dims.d[axis]); }
    int out(int slot, int axis) const { return static_cast<int>(outputDescs[slot].dims.d[axis]); }

    template <typename T = void>
    T const* input(int slot) const
    {
        return static_cast<T const*>(inputs[slot]);
    }
    template <typename T = void>
    T* output(int slot) const
    {
        return static_cast<T*>(outputs[slot]);
    }

    int integer(char const* name) const { return static_cast<int>(value(name).number); }
    float real(char const* name) const { return static_cast<float>(value(name).number); }
    std::vector<int32_t> const& list(char const* name) const { return value(name).list; }

private:
    AttributeValue const& value(char const* name) const
    {
        int const index = op->attribute(name);
        if (index < 0)
        {
            throw std::logic_error(std::string(op->record->name) + " has no attribute " + name);
        }
        return (*attributes)[static_cast<size_t>(index)];
    }
};

} // namespace glm
