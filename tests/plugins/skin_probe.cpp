// Drives the plugin library as TensorRT does, on a machine without one: loads it, makes plugins, asks about shapes, types,
// formats and state, and hands it wrong shapes and wrong addresses. Prints one line a finding; test_skin.py reads them.
#include "tensorrt/trt_api.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace
{

class PrintingLogger final : public ILogger
{
public:
    void log(Severity severity, AsciiChar const* message) noexcept override
    {
        std::printf("log %d %s\n", static_cast<int>(severity), message);
    }
};

class Finder final : public ILoggerFinder
{
public:
    ILogger* findLogger() override { return &logger; }
    PrintingLogger logger;
};

PluginTensorDesc tensor(DataType type, std::vector<int64_t> const& shape)
{
    PluginTensorDesc desc{};
    desc.type = type;
    desc.format = TensorFormat::kLINEAR;
    desc.dims.nbDims = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i)
    {
        desc.dims.d[i] = shape[i];
    }
    return desc;
}

struct Parts
{
    IPluginV3* plugin;
    IPluginV3OneCore* core;
    IPluginV3OneBuildV2* build;
    IPluginV3OneRuntime* run;
};

Parts parts(IPluginV3* plugin)
{
    auto get = [&](PluginCapabilityType type) { return plugin->getCapabilityInterface(type); };
    return {plugin, static_cast<IPluginV3OneCore*>(get(PluginCapabilityType::kCORE)),
        static_cast<IPluginV3OneBuildV2*>(get(PluginCapabilityType::kBUILD)),
        static_cast<IPluginV3OneRuntime*>(get(PluginCapabilityType::kRUNTIME))};
}

std::vector<IPluginCreatorV3One*> creators;

IPluginCreatorV3One* creator(char const* name)
{
    for (IPluginCreatorV3One* candidate : creators)
    {
        if (std::strcmp(candidate->getPluginName(), name) == 0)
        {
            return candidate;
        }
    }
    return nullptr;
}

IPluginV3* make(char const* name, std::vector<PluginField> const& fields, TensorRTPhase phase = TensorRTPhase::kBUILD)
{
    PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    return creator(name)->createPlugin("probe", &collection, phase);
}

void probeState()
{
    int32_t const slots = 4, topk = 10, ids[] = {7, 11};
    std::vector<PluginField> const fields = {{"num_slots", &slots, PluginFieldType::kINT32, 1},
        {"relaxed_topk", &topk, PluginFieldType::kINT32, 1}, {"thinking_end_ids", ids, PluginFieldType::kINT32, 2}};
    Parts first = parts(make("GlmAccept", fields));
    PluginFieldCollection const* saved = first.run->getFieldsToSerialize();
    std::vector<PluginField> const copy(saved->fields, saved->fields + saved->nbFields);
    Parts second = parts(make("GlmAccept", copy, TensorRTPhase::kRUNTIME));
    Parts third = parts(second.run->attachToContext(nullptr));
    delete first.plugin;
    delete second.plugin;
    PluginFieldCollection const* again = third.run->getFieldsToSerialize();
    for (int32_t i = 0; i < again->nbFields; ++i)
    {
        std::printf("state %s", again->fields[i].name);
        for (int32_t k = 0; k < again->fields[i].length; ++k)
        {
            std::printf(" %d", static_cast<int32_t const*>(again->fields[i].data)[k]);
        }
        std::printf("\n");
    }
    std::printf("core %s %s %s\n", third.core->getPluginName(), third.core->getPluginVersion(),
        third.core->getPluginNamespace());
    delete third.plugin;
}

void probeMissing()
{
    int32_t const layer = 0;
    IPluginV3* plugin = make("GlmRmsNorm", {{"layer", &layer, PluginFieldType::kINT32, 1}});
    std::printf("missing %s\n", plugin == nullptr ? "refused" : "accepted");
    float const wrong[] = {1.0F, 2.0F};
    int32_t const offset = 0;
    plugin = make("GlmRmsNorm",
        {{"eps", wrong, PluginFieldType::kFLOAT32, 2}, {"column_offset", &offset, PluginFieldType::kINT32, 1}});
    std::printf("two values %s\n", plugin == nullptr ? "refused" : "accepted");
}

void probeTypes()
{
    int32_t const flag = 1;
    Parts linear = parts(make("GlmLinearFp8", {{"to_f32", &flag, PluginFieldType::kINT32, 1}}));
    DataType const inputs[] = {DataType::kBF16, DataType::kFP8, DataType::kFLOAT};
    DataType output = DataType::kBOOL;
    linear.build->getOutputDataTypes(&output, 1, inputs, 3);
    std::printf("type %d\n", static_cast<int>(output));
    DynamicPluginTensorDesc tensors[4] = {};
    DataType const types[] = {DataType::kBF16, DataType::kFP8, DataType::kFLOAT, DataType::kFLOAT};
    for (int i = 0; i < 4; ++i)
    {
        tensors[i].desc = tensor(types[i], {4, 4});
        std::printf("format %d %d", i, linear.build->supportsFormatCombination(i, tensors, 3, 1));
        tensors[i].desc.format = static_cast<TensorFormat>(5);
        std::printf(" %d", linear.build->supportsFormatCombination(i, tensors, 3, 1));
        tensors[i].desc.format = TensorFormat::kLINEAR;
        tensors[i].desc.type = DataType::kHALF;
        std::printf(" %d\n", linear.build->supportsFormatCombination(i, tensors, 3, 1));
        tensors[i].desc.type = types[i];
    }
    std::printf("counts %d\n", linear.build->supportsFormatCombination(0, tensors, 2, 1));
    delete linear.plugin;
}

void probeShapes()
{
    int32_t const flag = 0;
    Parts linear = parts(make("GlmLinearFp8", {{"to_f32", &flag, PluginFieldType::kINT32, 1}}));
    PluginTensorDesc out = tensor(DataType::kBF16, {5, 200});
    PluginTensorDesc in[] = {tensor(DataType::kBF16, {5, 300}), tensor(DataType::kFP8, {200, 300}),
        tensor(DataType::kFLOAT, {2, 3})};
    std::printf("shapes %d\n", linear.run->onShapeChange(in, 3, &out, 1));
    in[2] = tensor(DataType::kFLOAT, {2, 2});
    std::printf("scale shape %d\n", linear.run->onShapeChange(in, 3, &out, 1));
    in[2] = tensor(DataType::kFLOAT, {2, 3, 1});
    std::printf("scale rank %d\n", linear.run->onShapeChange(in, 3, &out, 1));
    delete linear.plugin;
}

void probeAlias()
{
    std::vector<PluginField> fields;
    int32_t const one = 1, heads = 8, dim = 32, rope = 16, topk = 64;
    float const theta = 1e4F, eps = 1e-6F;
    fields = {{"layer", &one, PluginFieldType::kINT32, 1}, {"num_heads", &heads, PluginFieldType::kINT32, 1},
        {"head_dim", &dim, PluginFieldType::kINT32, 1}, {"rope_dim", &rope, PluginFieldType::kINT32, 1},
        {"rope_theta", &theta, PluginFieldType::kFLOAT32, 1}, {"interleaved", &one, PluginFieldType::kINT32, 1},
        {"index_topk", &topk, PluginFieldType::kINT32, 1}, {"eps", &eps, PluginFieldType::kFLOAT32, 1}};
    Parts indexer = parts(make("GlmIndexer", fields));
    std::printf("alias %d %d %d\n", indexer.build->getAliasedInput(0), indexer.build->getAliasedInput(1),
        indexer.build->getAliasedInput(2));
    std::printf("metadata %s\n", indexer.build->getMetadataString());
    std::vector<PluginTensorDesc> const in = {tensor(DataType::kBF16, {4, 256}), tensor(DataType::kFLOAT, {4, 40}),
        tensor(DataType::kFLOAT, {32}), tensor(DataType::kFLOAT, {32}), tensor(DataType::kINT32, {4}),
        tensor(DataType::kINT32, {4}), tensor(DataType::kINT32, {1, 2}), tensor(DataType::kINT8, {3, 5, 64, 36})};
    std::vector<PluginTensorDesc> const out
        = {tensor(DataType::kINT32, {4, 64}), tensor(DataType::kINT8, {3, 5, 64, 36})};
    std::printf("cache shapes %d\n", indexer.run->onShapeChange(in.data(), 8, out.data(), 2));
    std::vector<DynamicPluginTensorDesc> largest(8), outputs(2);
    for (size_t i = 0; i < 8; ++i)
    {
        largest[i].desc = in[i];
        largest[i].max = in[i].dims;
    }
    for (size_t i = 0; i < 2; ++i)
    {
        outputs[i].desc = out[i];
        outputs[i].max = out[i].dims;
    }
    std::printf("workspace %s\n", indexer.build->getWorkspaceSize(largest.data(), 8, outputs.data(), 2) > 0 ? "some" : "none");
    char bytes[16];
    void const* inputs[8] = {bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes};
    void* results[2] = {bytes, bytes + 8};
    std::printf("two buffers %d\n",
        indexer.run->enqueue(in.data(), out.data(), inputs, results, nullptr, nullptr) == 0 ? 0 : 1);
    delete indexer.plugin;
}

// A mask whose turn has no counterpart is refused, unless the op is being built, where nothing is waited for. No rows, so
// nothing is launched.
void probeWait()
{
    std::vector<PluginTensorDesc> const in = {tensor(DataType::kFLOAT, {0, 40}), tensor(DataType::kINT32, {0, 4, 2}),
        tensor(DataType::kINT32, {1}), tensor(DataType::kINT32, {1})};
    PluginTensorDesc const out = tensor(DataType::kFLOAT, {0, 40});
    char bytes[16];
    void const* inputs[4] = {bytes, bytes, bytes, nullptr};
    void* results[1] = {bytes};
    for (TensorRTPhase phase : {TensorRTPhase::kBUILD, TensorRTPhase::kRUNTIME})
    {
        Parts mask = parts(make("GlmMaskLogits", {}, phase));
        Parts copy = parts(mask.plugin->clone());
        delete mask.plugin;
        std::printf("wait %d\n", copy.run->enqueue(in.data(), &out, inputs, results, nullptr, nullptr));
        delete copy.plugin;
    }
}

} // namespace

int main(int argc, char** argv)
{
    void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (library == nullptr)
    {
        std::printf("cannot load: %s\n", dlerror());
        return 1;
    }
    using SetFinder = void (*)(ILoggerFinder*);
    using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
    static Finder finder;
    reinterpret_cast<SetFinder>(dlsym(library, "setLoggerFinder"))(&finder);
    int32_t count = 0;
    IPluginCreatorInterface* const* list = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"))(count);
    for (int32_t i = 0; i < count; ++i)
    {
        InterfaceInfo const info = list[i]->getInterfaceInfo();
        auto* made = static_cast<IPluginCreatorV3One*>(list[i]);
        std::printf("creator %s %s %s %s %d\n", made->getPluginName(), made->getPluginVersion(),
            made->getPluginNamespace(), info.kind, made->getFieldNames()->nbFields);
        creators.push_back(made);
    }
    probeState();
    probeMissing();
    probeTypes();
    probeShapes();
    probeAlias();
    probeWait();
    return 0;
}
