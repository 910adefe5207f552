// Messages go to the logger that TensorRT hands to setLoggerFinder; before that, errors go to stderr.
#pragma once

#include "trt_api.h"

#include <exception>
#include <string>

namespace glm
{

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept;
void logError(std::string const& message) noexcept;

// Runs `body`; an exception is logged under `where` and becomes `failure`. Nothing may leave a plugin by throwing: TensorRT's
// interfaces are noexcept, so the process would end without a word.
template <typename Result, typename Body>
Result guarded(char const* where, Result failure, Body const& body) noexcept
{
    try
    {
        return body();
    }
    catch (std::exception const& error)
    {
        logError(std::string(where) + ": " + error.what());
    }
    catch (...)
    {
        logError(std::string(where) + ": unknown exception");
    }
    return failure;
}

} // namespace glm
