// The part of the TensorRT plugin interface that the skin in ../tensorrt needs, for builds without TensorRT's headers.
//
// TensorRT's Python wheels bring the libraries and no headers. A plugin library talks to TensorRT only through virtual calls
// and a few plain structs, so what matters is the order of virtual functions, the layout of the structs and the numbers of
// the enumerators. This file states those, as of TensorRT 11.1 (and as TensorRT-RTX 1.6 and 1.7 use them). Names are
// TensorRT's, so the skin compiles unchanged against the official headers; tests/plugins/test_abi.py compares the two when
// TENSORRT_ROOT is given. Entries that the skin never uses are declared only to keep their place in a table.
//
// Itanium C++ ABI (Linux). Nothing here is to be called by name across the library border: no symbol is imported.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace nvinfer1
{

// ---- enumerators ----------------------------------------------------------------------------------------------------------

enum class DataType : int32_t
{
    kFLOAT = 0, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64, kINT4, kFP4, kE8M0
};

enum class TensorFormat : int32_t
{
    kLINEAR = 0 // the skin accepts no other
};

enum class PluginFieldType : int32_t
{
    kFLOAT16 = 0, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR, kDIMS, kUNKNOWN, kBF16, kINT64, kFP8, kINT4, kFP4
};

enum class TensorRTPhase : int32_t
{
    kBUILD = 0, kRUNTIME
};

enum class PluginCapabilityType : int32_t
{
    kCORE = 0, kBUILD, kRUNTIME
};

enum class DimensionOperation : int32_t
{
    kSUM = 0, kPROD, kMAX, kMIN, kSUB, kEQUAL, kLESS, kFLOOR_DIV, kCEIL_DIV
};

enum class APILanguage : int32_t
{
    kCPP = 0, kPYTHON
};

// ---- plain data -----------------------------------------------------------------------------------------------------------

using AsciiChar = char;

struct Dims64
{
    static constexpr int32_t MAX_DIMS = 8;
    int32_t nbDims;
    int64_t d[MAX_DIMS]; // 8-byte aligned: four bytes of padding after nbDims
};
using Dims = Dims64;

struct PluginTensorDesc
{
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc
{
    PluginTensorDesc desc;
    Dims min;
    Dims max;
    Dims opt;
};

struct PluginField
{
    AsciiChar const* name = nullptr;
    void const* data = nullptr;
    PluginFieldType type = PluginFieldType::kUNKNOWN;
    int32_t length = 0;

    PluginField() = default;
    PluginField(AsciiChar const* fieldName, void const* values, PluginFieldType valueType, int32_t numValues) noexcept
        : name(fieldName), data(values), type(valueType), length(numValues)
    {
    }
};

struct PluginFieldCollection
{
    int32_t nbFields = 0;
    PluginField const* fields = nullptr;
};

struct InterfaceInfo
{
    char const* kind; // compared as text by TensorRT
    int32_t major;
    int32_t minor;
};

// ---- objects of TensorRT that plugins call --------------------------------------------------------------------------------

// Such an object holds a pointer to an implementation right after its own table pointer; calls go to the implementation.
class INoCopy
{
public:
    INoCopy(INoCopy const&) = delete;
    INoCopy& operator=(INoCopy const&) = delete;

protected:
    INoCopy() = default;
    virtual ~INoCopy() = default;
};

class IDimensionExpr;

namespace apiv
{
class VRoot
{
public:
    virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot
{
public:
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot
{
public:
    virtual IDimensionExpr const* constant(int64_t value) = 0;
    virtual IDimensionExpr const* operation(
        DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) = 0;
    virtual IDimensionExpr const* declareSizeTensor(
        int32_t outputIndex, IDimensionExpr const& opt, IDimensionExpr const& upper) = 0;
};
} // namespace apiv

class IDimensionExpr : public INoCopy
{
public:
    bool isConstant() const noexcept { return mImpl->isConstant(); }
    int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }

protected:
    ~IDimensionExpr() noexcept override = default;
    apiv::VDimensionExpr* mImpl = nullptr;
};

class IExprBuilder : public INoCopy
{
public:
    IDimensionExpr const* constant(int64_t value) noexcept { return mImpl->constant(value); }
    IDimensionExpr const* operation(
        DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) noexcept
    {
        return mImpl->operation(op, first, second);
    }

protected:
    ~IExprBuilder() noexcept override = default;
    apiv::VExprBuilder* mImpl = nullptr;
};

struct DimsExprs
{
    int32_t nbDims;
    IDimensionExpr const* d[Dims::MAX_DIMS];
};

// ---- interfaces that plugins implement ------------------------------------------------------------------------------------

// Root of every versioned interface: two calls, then the destructor pair.
class IVersionedInterface
{
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

class ILogger : public IVersionedInterface
{
public:
    enum class Severity : int32_t
    {
        kINTERNAL_ERROR = 0, kERROR, kWARNING, kINFO, kVERBOSE
    };
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
    virtual void log(Severity severity, AsciiChar const* message) noexcept = 0;
};

class ILoggerFinder : public IVersionedInterface
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
    virtual ILogger* findLogger() = 0;
};

class IPluginResourceContext; // passed through untouched

class IPluginCapability : public IVersionedInterface
{
};

class IPluginV3 : public IVersionedInterface
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

// The build capability with its version-2 addition at the end; what TensorRT calls V3OneBuildV2.
class IPluginV3OneBuildV2 : public IPluginCapability
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
        DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(
        DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* shapeInputs,
        int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(
        int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(
        DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept
    {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual char const* getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual char const* getMetadataString() noexcept { return nullptr; }
    virtual int32_t getAliasedInput(int32_t) noexcept { return -1; }
};

class IPluginV3OneRuntime : public IPluginCapability
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(
        PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface : public IVersionedInterface
{
};

class IPluginCreatorV3One : public IPluginCreatorInterface
{
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3* createPlugin(
        AsciiChar const* name, PluginFieldCollection const* fields, TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual AsciiChar const* getPluginName() const noexcept = 0;
    virtual AsciiChar const* getPluginVersion() const noexcept = 0;
    virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

} // namespace nvinfer1
