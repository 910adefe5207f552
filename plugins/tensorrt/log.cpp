#include "log.h"

#include <atomic>
#include <cstdio>

namespace glm
{
namespace
{
std::atomic<nvinfer1::ILoggerFinder*> loggerFinder{nullptr};
} // namespace

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept
{
    loggerFinder.store(finder);
}

void logError(std::string const& message) noexcept
{
    try
    {
        nvinfer1::ILoggerFinder* finder = loggerFinder.load();
        nvinfer1::ILogger* logger = finder != nullptr ? finder->findLogger() : nullptr;
        if (logger != nullptr)
        {
            logger->log(nvinfer1::ILogger::Severity::kERROR, ("glm_mtp_plugins: " + message).c_str());
            return;
        }
    }
    catch (...) // the finder threw: stderr is left
    {
    }
    std::fprintf(stderr, "glm_mtp_plugins: %s\n", message.c_str());
}

} // namespace glm
