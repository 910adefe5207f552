#include "plugin.h"

#include "dimensions.h"

#include <glm_kernels/status.h>

namespace glm
{

using nvinfer1::DataType;
using nvinfer1::PluginTensorDesc;

namespace
{

constexpr size_t kWorkspaceAlignment = 256;

void* aligned(void* workspace)
{
    auto const address = reinterpret_cast<uintptr_t>(workspace);
    return reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
}

bool accepts(Type type, DataType found)
{
    switch (type)
    {
    case Type::kActivation: return found == DataType::kBF16;
    case Type::kActivationOrFloat: return found == DataType::kBF16 || found == DataType::kFLOAT;
    case Type::kCache: return found == DataType::kBF16 || found == DataType::kINT8;
    case Type::kBfloat16: return found == DataType::kBF16;
    case Type::kBool: return found == DataType::kBOOL;
    case Type::kFloat: return found == DataType::kFLOAT;
    case Type::kFloat8: return found == DataType::kFP8;
    case Type::kInt8: return found == DataType::kINT8;
    case Type::kInt32: return found == DataType::kINT32;
    case Type::kInt64: return found == DataType::kINT64;
    // The builder refuses UINT8 at plugins, so it is given bytes as INT8; nothing reads their sign.
    case Type::kUint8: return found == DataType::kUINT8 || found == DataType::kINT8;
    }
    return false;
}

std::string shapeText(nvinfer1::Dims const& dims)
{
    std::string text = "[";
    for (int i = 0; i < dims.nbDims; ++i)
    {
        text += (i ? ", " : "") + std::to_string(dims.d[i]);
    }
    return text + "]";
}

} // namespace

Plugin::Plugin(Op const& op, std::vector<AttributeValue> values, nvinfer1::TensorRTPhase phase)
    : op_(op), values_(std::move(values)), phase_(phase)
{
    for (size_t i = 0; i < values_.size(); ++i)
    {
        Attribute const& attribute = op_.record->attributes[i];
        if (attribute.kind == Kind::kInt)
        {
            metadata_ += (metadata_.empty() ? "" : ", ") + std::string(attribute.name) + "="
                + std::to_string(static_cast<int64_t>(values_[i].number));
        }
    }
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept
{
    return guarded<nvinfer1::IPluginV3*>("clone", nullptr, [&] { return new Plugin(*this); });
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept
{
    return clone();
}

int64_t Plugin::attributeInt(int index) const
{
    return static_cast<int64_t>(values_[static_cast<size_t>(index)].number);
}

void Plugin::checkCounts(int32_t numInputs, int32_t numOutputs) const
{
    size_t const inputs = op_.record->inputs.size();
    size_t const outputs = op_.record->outputs.size();
    if (static_cast<size_t>(numInputs) != inputs || static_cast<size_t>(numOutputs) != outputs)
    {
        throw std::runtime_error("has " + std::to_string(numInputs) + " inputs and " + std::to_string(numOutputs)
            + " outputs, expected " + std::to_string(inputs) + " and " + std::to_string(outputs)
            + "; the graph and the plugin library are of different releases, export again");
    }
}

int32_t Plugin::configurePlugin(nvinfer1::DynamicPluginTensorDesc const*, int32_t numInputs,
    nvinfer1::DynamicPluginTensorDesc const*, int32_t numOutputs) noexcept
{
    return guarded<int32_t>(op_.record->name, -1, [&] {
        checkCounts(numInputs, numOutputs);
        return 0;
    });
}

DataType Plugin::outputType(size_t slot, DataType const* inputTypes) const
{
    Port const& port = op_.record->outputs[slot];
    if (port.alias >= 0)
    {
        return inputTypes[port.alias];
    }
    switch (port.type)
    {
    case Type::kActivationOrFloat:
    {
        int const flag = op_.attribute("to_f32");
        return flag >= 0 && attributeInt(flag) != 0 ? DataType::kFLOAT : DataType::kBF16;
    }
    case Type::kFloat: return DataType::kFLOAT;
    case Type::kInt32: return DataType::kINT32;
    case Type::kInt64: return DataType::kINT64;
    case Type::kInt8: return DataType::kINT8;
    case Type::kFloat8: return DataType::kFP8;
    default: return DataType::kBF16;
    }
}

int32_t Plugin::getOutputDataTypes(
    DataType* outputTypes, int32_t numOutputs, DataType const* inputTypes, int32_t numInputs) const noexcept
{
    return guarded<int32_t>(op_.record->name, -1, [&] {
        checkCounts(numInputs, numOutputs);
        for (size_t slot = 0; slot < op_.record->outputs.size(); ++slot)
        {
            outputTypes[slot] = outputType(slot, inputTypes);
        }
        return 0;
    });
}

int32_t Plugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs, nvinfer1::DimsExprs const*, int32_t,
    nvinfer1::DimsExprs* outputs, int32_t numOutputs, nvinfer1::IExprBuilder& builder) noexcept
{
    return guarded<int32_t>(op_.record->name, -1, [&] {
        checkCounts(numInputs, numOutputs);
        for (size_t slot = 0; slot < op_.record->inputs.size(); ++slot)
        {
            if (static_cast<size_t>(inputs[slot].nbDims) != op_.record->inputs[slot].dimensions.size())
            {
                throw std::runtime_error(std::string("input ") + op_.record->inputs[slot].name + " has "
                    + std::to_string(inputs[slot].nbDims) + " dimensions, expected "
                    + std::to_string(op_.record->inputs[slot].dimensions.size()) + "; export again");
            }
        }
        Expressions const algebra{builder};
        auto extent = [&](int slot, int axis) { return inputs[slot].d[axis]; };
        for (size_t slot = 0; slot < op_.record->outputs.size(); ++slot)
        {
            Port const& port = op_.record->outputs[slot];
            if (port.alias >= 0)
            {
                outputs[slot] = inputs[port.alias];
                continue;
            }
            outputs[slot].nbDims = static_cast<int32_t>(port.dimensions.size());
            for (size_t axis = 0; axis < port.dimensions.size(); ++axis)
            {
                outputs[slot].d[axis] = evaluate(
                    port.dimensions[axis], op_, algebra, extent, [&](int index) { return attributeInt(index); });
            }
        }
        return 0;
    });
}

bool Plugin::supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
    int32_t numInputs, int32_t numOutputs) noexcept
{
    return guarded<bool>(op_.record->name, false, [&] {
        checkCounts(numInputs, numOutputs);
        PluginTensorDesc const& tensor = tensors[position].desc;
        if (tensor.format != nvinfer1::TensorFormat::kLINEAR)
        {
            return false;
        }
        if (position < numInputs)
        {
            return accepts(op_.record->inputs[static_cast<size_t>(position)].type, tensor.type);
        }
        Port const& port = op_.record->outputs[static_cast<size_t>(position - numInputs)];
        if (port.alias >= 0)
        {
            return tensor.type == tensors[port.alias].desc.type;
        }
        return tensor.type == outputType(static_cast<size_t>(position - numInputs), nullptr);
    });
}

size_t Plugin::getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t numInputs,
    nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t numOutputs) const noexcept
{
    if (op_.binding->workspace == nullptr)
    {
        return 0;
    }
    return guarded<size_t>(op_.record->name, 0, [&] {
        std::vector<PluginTensorDesc> ins, outs; // at the profile's largest shapes
        for (int32_t i = 0; i < numInputs; ++i)
        {
            ins.push_back(inputs[i].desc);
            ins.back().dims = inputs[i].max;
        }
        for (int32_t i = 0; i < numOutputs; ++i)
        {
            outs.push_back(outputs[i].desc);
            outs.back().dims = outputs[i].max;
        }
        Call call;
        call.op = &op_;
        call.attributes = &values_;
        call.inputDescs = ins.data();
        call.outputDescs = outs.data();
        // Room to move the start up: TensorRT aligns a workspace to 128 bytes, the kernels ask for more.
        size_t const bytes = op_.binding->workspace(call);
        return bytes == 0 ? 0 : bytes + kWorkspaceAlignment;
    });
}

int32_t Plugin::getAliasedInput(int32_t outputIndex) noexcept
{
    return outputIndex >= 0 && outputIndex < getNbOutputs()
        ? op_.record->outputs[static_cast<size_t>(outputIndex)].alias
        : -1;
}

void Plugin::checkShapes(PluginTensorDesc const* tensors, std::vector<Port> const& ports, PluginTensorDesc const* inputs) const
{
    auto extent = [&](int slot, int axis) { return inputs[slot].dims.d[axis]; };
    auto attribute = [&](int index) { return attributeInt(index); };
    for (size_t slot = 0; slot < ports.size(); ++slot)
    {
        Port const& port = ports[slot];
        nvinfer1::Dims const& dims = tensors[slot].dims;
        nvinfer1::Dims expected{};
        expected.nbDims = static_cast<int32_t>(port.dimensions.size());
        bool same = dims.nbDims == expected.nbDims;
        for (int axis = 0; axis < expected.nbDims; ++axis)
        {
            expected.d[axis] = evaluate(port.dimensions[static_cast<size_t>(axis)], op_, Numbers{}, extent, attribute);
            same = same && dims.d[axis] == expected.d[axis];
        }
        if (!same)
        {
            throw std::runtime_error(
                std::string(port.name) + " is " + shapeText(dims) + ", expected " + shapeText(expected));
        }
    }
}

int32_t Plugin::onShapeChange(
    PluginTensorDesc const* in, int32_t numInputs, PluginTensorDesc const* out, int32_t numOutputs) noexcept
{
    return guarded<int32_t>(op_.record->name, -1, [&] {
        checkCounts(numInputs, numOutputs);
        for (size_t slot = 0; slot < op_.record->inputs.size(); ++slot)
        {
            if (static_cast<size_t>(in[slot].dims.nbDims) != op_.record->inputs[slot].dimensions.size())
            {
                throw std::runtime_error(
                    std::string(op_.record->inputs[slot].name) + " is " + shapeText(in[slot].dims) + ", wrong rank");
            }
        }
        checkShapes(in, op_.record->inputs, in);
        checkShapes(out, op_.record->outputs, in);
        return 0;
    });
}

int32_t Plugin::enqueue(PluginTensorDesc const* inputDescs, PluginTensorDesc const* outputDescs, void const* const* inputs,
    void* const* outputs, void* workspace, cudaStream_t stream) noexcept
{
    return guarded<int32_t>(op_.record->name, -1, [&] {
        for (size_t slot = 0; slot < op_.record->outputs.size(); ++slot)
        {
            Port const& port = op_.record->outputs[slot];
            if (port.alias >= 0 && outputs[slot] != inputs[port.alias])
            {
                throw std::runtime_error(std::string("output ") + port.name
                    + " must have the address of input " + op_.record->inputs[static_cast<size_t>(port.alias)].name
                    + ": bind one buffer to both");
            }
        }
        Call call;
        call.op = &op_;
        call.attributes = &values_;
        call.inputDescs = inputDescs;
        call.outputDescs = outputDescs;
        call.inputs = inputs;
        call.outputs = outputs;
        call.workspace = aligned(workspace);
        call.stream = stream;
        call.building = phase_ == nvinfer1::TensorRTPhase::kBUILD;
        call.workspaceBytes = op_.binding->workspace != nullptr ? op_.binding->workspace(call) : 0;
        int const status = op_.binding->enqueue(call);
        if (status != 0)
        {
            throw std::runtime_error("kernel status " + std::to_string(status) + ": " + glm_kernels_last_error());
        }
        return 0;
    });
}

nvinfer1::PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept
{
    return guarded<nvinfer1::PluginFieldCollection const*>(op_.record->name, nullptr, [&] {
        serialisedInts_.clear();
        serialisedFloats_.clear();
        fields_.clear();
        size_t numInts = 0;
        for (AttributeValue const& value : values_)
        {
            numInts += 1 + value.list.size();
        }
        serialisedInts_.reserve(numInts); // the fields keep addresses into these two, so they must not move
        serialisedFloats_.reserve(values_.size());
        for (size_t i = 0; i < values_.size(); ++i)
        {
            Attribute const& attribute = op_.record->attributes[i];
            AttributeValue const& value = values_[i];
            if (attribute.kind == Kind::kFloat)
            {
                serialisedFloats_.push_back(static_cast<float>(value.number));
                fields_.emplace_back(attribute.name, &serialisedFloats_.back(), nvinfer1::PluginFieldType::kFLOAT32, 1);
                continue;
            }
            int32_t const* first = serialisedInts_.data() + serialisedInts_.size();
            if (attribute.kind == Kind::kInt)
            {
                serialisedInts_.push_back(static_cast<int32_t>(value.number));
            }
            else
            {
                serialisedInts_.insert(serialisedInts_.end(), value.list.begin(), value.list.end());
            }
            auto const count = static_cast<int32_t>(serialisedInts_.data() + serialisedInts_.size() - first);
            fields_.emplace_back(attribute.name, first, nvinfer1::PluginFieldType::kINT32, count);
        }
        collection_.nbFields = static_cast<int32_t>(fields_.size());
        collection_.fields = fields_.data();
        return &collection_;
    });
}

} // namespace glm
