// Prints what a plugin library relies on: sizes, offsets, enumerators, interface names and the place of each virtual function.
// Compiled once against trt_plugin_abi.h and once against TensorRT's headers; the two outputs must be the same text.
#include "../tensorrt/trt_api.h"

#include <cstddef>
#include <cstdio>
#include <cstring>

using namespace nvinfer1;

namespace
{

// In the Itanium C++ ABI a pointer to a virtual member function holds 1 + the byte offset of its table entry.
template <typename Member>
long tableSlot(Member member)
{
    static_assert(sizeof(Member) == 2 * sizeof(long), "not the Itanium C++ ABI");
    long words[2];
    std::memcpy(words, &member, sizeof(words));
    return (words[0] & 1) != 0 ? (words[0] - 1) / static_cast<long>(sizeof(void*)) : -1;
}

class Finder final : public ILoggerFinder
{
public:
    ILogger* findLogger() override { return nullptr; }
};

class Logger final : public ILogger
{
public:
    void log(Severity, AsciiChar const*) noexcept override {}
};

class Core final : public IPluginV3OneCore
{
public:
    AsciiChar const* getPluginName() const noexcept override { return ""; }
    AsciiChar const* getPluginVersion() const noexcept override { return ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
};

class Build final : public IPluginV3OneBuildV2
{
public:
    int32_t configurePlugin(
        DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) noexcept override
    {
        return 0;
    }
    int32_t getOutputDataTypes(DataType*, int32_t, DataType const*, int32_t) const noexcept override { return 0; }
    int32_t getOutputShapes(DimsExprs const*, int32_t, DimsExprs const*, int32_t, DimsExprs*, int32_t,
        IExprBuilder&) noexcept override
    {
        return 0;
    }
    bool supportsFormatCombination(int32_t, DynamicPluginTensorDesc const*, int32_t, int32_t) noexcept override
    {
        return true;
    }
    int32_t getNbOutputs() const noexcept override { return 1; }
};

class Run final : public IPluginV3OneRuntime
{
public:
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override
    {
        return 0;
    }
    int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*,
        cudaStream_t) noexcept override
    {
        return 0;
    }
    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return nullptr; }
    PluginFieldCollection const* getFieldsToSerialize() noexcept override { return nullptr; }
};

class Plugin final : public IPluginV3
{
public:
    IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept override { return nullptr; }
    IPluginV3* clone() noexcept override { return nullptr; }
};

class Creator final : public IPluginCreatorV3One
{
public:
    IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const*, TensorRTPhase) noexcept override
    {
        return nullptr;
    }
    PluginFieldCollection const* getFieldNames() noexcept override { return nullptr; }
    AsciiChar const* getPluginName() const noexcept override { return ""; }
    AsciiChar const* getPluginVersion() const noexcept override { return ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
};

// Exposes where the implementation pointer of a TensorRT object lies. The layout of a class does not depend on access.
template <typename Object>
struct ImplementationOffset : Object
{
    static long value()
    {
        alignas(Object) static unsigned char storage[sizeof(Object)] = {};
        auto* object = reinterpret_cast<ImplementationOffset*>(storage);
        return reinterpret_cast<unsigned char*>(&object->mImpl) - storage;
    }
};

template <typename Interface>
void interfaceInfo(char const* name)
{
    Interface object;
    InterfaceInfo const info = object.getInterfaceInfo();
    std::printf("interface %s: %s %d.%d, %zu bytes, language %d\n", name, info.kind, info.major, info.minor,
        sizeof(Interface), static_cast<int>(object.getAPILanguage()));
}

} // namespace

#define SIZE(type) std::printf("size %s: %zu, alignment %zu\n", #type, sizeof(type), alignof(type))
#define OFFSET(type, member) std::printf("offset %s.%s: %zu\n", #type, #member, offsetof(type, member))
#define SLOT(type, method) std::printf("slot %s.%s: %ld\n", #type, #method, tableSlot(&type::method))
#define NUMBER(value) std::printf("number %s: %d\n", #value, static_cast<int>(value))

int main()
{
    SIZE(Dims);
    SIZE(PluginTensorDesc);
    SIZE(DynamicPluginTensorDesc);
    SIZE(PluginField);
    SIZE(PluginFieldCollection);
    SIZE(InterfaceInfo);
    SIZE(DimsExprs);
    SIZE(IDimensionExpr);
    SIZE(IExprBuilder);
    NUMBER(Dims::MAX_DIMS);
    OFFSET(Dims, nbDims);
    OFFSET(Dims, d);
    OFFSET(PluginTensorDesc, dims);
    OFFSET(PluginTensorDesc, type);
    OFFSET(PluginTensorDesc, format);
    OFFSET(PluginTensorDesc, scale);
    OFFSET(DynamicPluginTensorDesc, desc);
    OFFSET(DynamicPluginTensorDesc, min);
    OFFSET(DynamicPluginTensorDesc, max);
    OFFSET(DynamicPluginTensorDesc, opt);
    OFFSET(PluginField, name);
    OFFSET(PluginField, data);
    OFFSET(PluginField, type);
    OFFSET(PluginField, length);
    OFFSET(PluginFieldCollection, nbFields);
    OFFSET(PluginFieldCollection, fields);
    OFFSET(InterfaceInfo, kind);
    OFFSET(InterfaceInfo, major);
    OFFSET(InterfaceInfo, minor);
    OFFSET(DimsExprs, nbDims);
    OFFSET(DimsExprs, d);
    std::printf("offset IDimensionExpr implementation: %ld\n", ImplementationOffset<IDimensionExpr>::value());
    std::printf("offset IExprBuilder implementation: %ld\n", ImplementationOffset<IExprBuilder>::value());

    NUMBER(DataType::kFLOAT);
    NUMBER(DataType::kHALF);
    NUMBER(DataType::kINT8);
    NUMBER(DataType::kINT32);
    NUMBER(DataType::kBOOL);
    NUMBER(DataType::kUINT8);
    NUMBER(DataType::kFP8);
    NUMBER(DataType::kBF16);
    NUMBER(DataType::kINT64);
    NUMBER(DataType::kINT4);
    NUMBER(DataType::kFP4);
    NUMBER(DataType::kE8M0);
    NUMBER(TensorFormat::kLINEAR);
    NUMBER(PluginFieldType::kFLOAT32);
    NUMBER(PluginFieldType::kINT32);
    NUMBER(PluginFieldType::kINT64);
    NUMBER(PluginFieldType::kUNKNOWN);
    NUMBER(PluginFieldType::kFP4);
    NUMBER(TensorRTPhase::kBUILD);
    NUMBER(TensorRTPhase::kRUNTIME);
    NUMBER(PluginCapabilityType::kCORE);
    NUMBER(PluginCapabilityType::kBUILD);
    NUMBER(PluginCapabilityType::kRUNTIME);
    NUMBER(DimensionOperation::kSUM);
    NUMBER(DimensionOperation::kPROD);
    NUMBER(DimensionOperation::kMAX);
    NUMBER(DimensionOperation::kSUB);
    NUMBER(DimensionOperation::kFLOOR_DIV);
    NUMBER(DimensionOperation::kCEIL_DIV);
    NUMBER(ILogger::Severity::kINTERNAL_ERROR);
    NUMBER(ILogger::Severity::kERROR);
    NUMBER(ILogger::Severity::kVERBOSE);

    SLOT(IVersionedInterface, getAPILanguage);
    SLOT(IVersionedInterface, getInterfaceInfo);
    SLOT(ILogger, log);
    SLOT(ILoggerFinder, findLogger);
    SLOT(apiv::VDimensionExpr, isConstant);
    SLOT(apiv::VDimensionExpr, getConstantValue);
    SLOT(apiv::VExprBuilder, constant);
    SLOT(apiv::VExprBuilder, operation);
    SLOT(IPluginV3, getCapabilityInterface);
    SLOT(IPluginV3, clone);
    SLOT(IPluginV3OneCore, getPluginName);
    SLOT(IPluginV3OneCore, getPluginVersion);
    SLOT(IPluginV3OneCore, getPluginNamespace);
    SLOT(IPluginV3OneBuildV2, configurePlugin);
    SLOT(IPluginV3OneBuildV2, getOutputDataTypes);
    SLOT(IPluginV3OneBuildV2, getOutputShapes);
    SLOT(IPluginV3OneBuildV2, supportsFormatCombination);
    SLOT(IPluginV3OneBuildV2, getNbOutputs);
    SLOT(IPluginV3OneBuildV2, getWorkspaceSize);
    SLOT(IPluginV3OneBuildV2, getValidTactics);
    SLOT(IPluginV3OneBuildV2, getNbTactics);
    SLOT(IPluginV3OneBuildV2, getTimingCacheID);
    SLOT(IPluginV3OneBuildV2, getFormatCombinationLimit);
    SLOT(IPluginV3OneBuildV2, getMetadataString);
    SLOT(IPluginV3OneBuildV2, getAliasedInput);
    SLOT(IPluginV3OneRuntime, setTactic);
    SLOT(IPluginV3OneRuntime, onShapeChange);
    SLOT(IPluginV3OneRuntime, enqueue);
    SLOT(IPluginV3OneRuntime, attachToContext);
    SLOT(IPluginV3OneRuntime, getFieldsToSerialize);
    SLOT(IPluginCreatorV3One, createPlugin);
    SLOT(IPluginCreatorV3One, getFieldNames);
    SLOT(IPluginCreatorV3One, getPluginName);
    SLOT(IPluginCreatorV3One, getPluginVersion);
    SLOT(IPluginCreatorV3One, getPluginNamespace);

    interfaceInfo<Logger>("ILogger");
    interfaceInfo<Finder>("ILoggerFinder");
    interfaceInfo<Plugin>("IPluginV3");
    interfaceInfo<Core>("IPluginV3OneCore");
    interfaceInfo<Build>("IPluginV3OneBuildV2");
    interfaceInfo<Run>("IPluginV3OneRuntime");
    interfaceInfo<Creator>("IPluginCreatorV3One");
    Build build;
    std::printf("default format combinations: %d, alias: %d, tactics: %d\n", build.getFormatCombinationLimit(),
        build.getAliasedInput(0), build.getNbTactics());
    return 0;
}
