// Entry points of libglm_mtp_plugins.so: what TensorRT asks for when it loads a plugin library, and a description for tools
// that have no TensorRT at hand. No NvInfer symbol is imported.
#include "plugin.h"

#include <glm_kernels/status.h>

#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>

#if !defined(GLM_PLUGIN_ARCHS)
#define GLM_PLUGIN_ARCHS ""
#endif
#if !defined(GLM_PLUGIN_RELEASE)
#define GLM_PLUGIN_RELEASE ""
#endif

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace glm
{
namespace
{

nvinfer1::PluginFieldType fieldType(Kind kind)
{
    return kind == Kind::kFloat ? nvinfer1::PluginFieldType::kFLOAT32 : nvinfer1::PluginFieldType::kINT32;
}

template <typename Number>
std::vector<Number> numbers(nvinfer1::PluginField const& field)
{
    std::vector<Number> out;
    for (int32_t i = 0; i < field.length; ++i)
    {
        switch (field.type)
        {
        case nvinfer1::PluginFieldType::kINT32: out.push_back(static_cast<Number>(static_cast<int32_t const*>(field.data)[i])); break;
        case nvinfer1::PluginFieldType::kINT64: out.push_back(static_cast<Number>(static_cast<int64_t const*>(field.data)[i])); break;
        case nvinfer1::PluginFieldType::kFLOAT32: out.push_back(static_cast<Number>(static_cast<float const*>(field.data)[i])); break;
        case nvinfer1::PluginFieldType::kFLOAT64: out.push_back(static_cast<Number>(static_cast<double const*>(field.data)[i])); break;
        default: throw std::runtime_error(std::string("field ") + field.name + " is neither integer nor float");
        }
    }
    return out;
}

AttributeValue read(Attribute const& attribute, nvinfer1::PluginField const& field)
{
    AttributeValue value;
    if (attribute.kind == Kind::kInts)
    {
        value.list = numbers<int32_t>(field);
        return value;
    }
    std::vector<double> const found = numbers<double>(field);
    if (found.size() != 1)
    {
        throw std::runtime_error(
            std::string("field ") + field.name + " has " + std::to_string(found.size()) + " values, expected 1");
    }
    value.number = found[0];
    return value;
}

class Creator final : public nvinfer1::IPluginCreatorV3One
{
public:
    explicit Creator(Op const& op) : op_(op)
    {
        for (Attribute const& attribute : op.record->attributes)
        {
            fields_.emplace_back(attribute.name, nullptr, fieldType(attribute.kind), 1);
        }
        collection_.nbFields = static_cast<int32_t>(fields_.size());
        collection_.fields = fields_.data();
    }
    Creator(Creator const&) = delete;

    nvinfer1::IPluginV3* createPlugin(
        char const*, nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase) noexcept override
    {
        return guarded<nvinfer1::IPluginV3*>(op_.record->name, nullptr, [&] {
            std::vector<AttributeValue> values;
            std::string missing;
            for (Attribute const& attribute : op_.record->attributes)
            {
                nvinfer1::PluginField const* field = nullptr;
                for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i)
                {
                    if (std::strcmp(fields->fields[i].name, attribute.name) == 0)
                    {
                        field = &fields->fields[i];
                    }
                }
                // An empty list has no data in some parsers, and so no field: it means the empty list.
                if (field == nullptr && attribute.kind != Kind::kInts)
                {
                    missing += std::string(missing.empty() ? "" : ", ") + attribute.name;
                }
                values.push_back(field != nullptr ? read(attribute, *field) : AttributeValue{});
            }
            if (!missing.empty())
            {
                throw std::runtime_error("attributes missing: " + missing + "; export the graph with this release");
            }
            return new Plugin(op_, std::move(values), phase);
        });
    }

    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
    char const* getPluginName() const noexcept override { return op_.record->name; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

private:
    Op op_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_;
};

// Lives as long as the library, since the registry keeps the addresses.
std::vector<nvinfer1::IPluginCreatorInterface*> const& creators()
{
    static std::vector<std::unique_ptr<Creator>> owned;
    static std::vector<nvinfer1::IPluginCreatorInterface*> const list = [] {
        std::vector<nvinfer1::IPluginCreatorInterface*> out;
        for (Op const& op : ops())
        {
            owned.push_back(std::make_unique<Creator>(op));
            out.push_back(owned.back().get());
        }
        return out;
    }();
    return list;
}

std::string description()
{
    std::string text = std::string("{\"release\": \"") + GLM_PLUGIN_RELEASE + "\", \"archs\": \"" + GLM_PLUGIN_ARCHS
        + "\", \"cuda\": " + std::to_string(CUDART_VERSION) + ", \"kernels_abi\": " + std::to_string(glm_kernels_abi_version()) + ", \"namespace\": \"" + kPluginNamespace
        + "\", \"version\": \"" + kPluginVersion + "\", \"ops\": [";
    for (Op const& op : ops())
    {
        text += std::string(text.back() == '[' ? "\"" : ", \"") + op.record->name + "\"";
    }
    return text + "]}";
}

} // namespace
} // namespace glm

GLM_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    glm::setFinder(finder);
}

GLM_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    count = 0;
    return glm::guarded<nvinfer1::IPluginCreatorInterface* const*>("getCreators", nullptr, [&] {
        auto const& list = glm::creators();
        count = static_cast<int32_t>(list.size());
        return list.data();
    });
}

// JSON: release, archs, CUDA, namespace, version and names of the ops. Owned by the library.
GLM_EXPORT char const* glm_mtp_plugins_info()
{
    return glm::guarded<char const*>("glm_mtp_plugins_info", "{}", [] {
        static std::string const text = glm::description();
        return text.c_str();
    });
}
