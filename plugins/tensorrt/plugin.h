// The one plugin class: an op of the table with its attribute values.
#pragma once

#include "call.h"
#include "log.h"
#include "op.h"

namespace glm
{

// All state is the attribute values and the phase it was made for; the values alone are serialised. The object is copied by
// clone() and attachToContext().
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime
{
public:
    Plugin(Op const& op, std::vector<AttributeValue> values, nvinfer1::TensorRTPhase phase);
    Plugin(Plugin const& other) : Plugin(other.op_, other.values_, other.phase_) {}

    // IPluginV3
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    // IPluginV3OneCore
    char const* getPluginName() const noexcept override { return op_.record->name; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

    // IPluginV3OneBuildV2
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t numInputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t numOutputs) noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t numOutputs, nvinfer1::DataType const* inputTypes,
        int32_t numInputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t numInputs, nvinfer1::DimsExprs const* shapeInputs,
        int32_t numShapeInputs, nvinfer1::DimsExprs* outputs, int32_t numOutputs,
        nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t numInputs,
        int32_t numOutputs) noexcept override;
    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(op_.record->outputs.size()); }
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t numInputs,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t numOutputs) const noexcept override;
    char const* getMetadataString() noexcept override { return metadata_.c_str(); }
    int32_t getAliasedInput(int32_t outputIndex) noexcept override;

    // IPluginV3OneRuntime
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t numInputs, nvinfer1::PluginTensorDesc const* out,
        int32_t numOutputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDescs, nvinfer1::PluginTensorDesc const* outputDescs,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    nvinfer1::DataType outputType(size_t slot, nvinfer1::DataType const* inputTypes) const;
    int64_t attributeInt(int index) const;
    void checkCounts(int32_t numInputs, int32_t numOutputs) const;
    void checkShapes(nvinfer1::PluginTensorDesc const* tensors, std::vector<Port> const& ports,
        nvinfer1::PluginTensorDesc const* inputs) const;

    Op op_;
    std::vector<AttributeValue> values_;
    nvinfer1::TensorRTPhase phase_;
    std::string metadata_;
    std::vector<int32_t> serialisedInts_; // storage that the serialised fields point to
    std::vector<float> serialisedFloats_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_;
};

} // namespace glm
