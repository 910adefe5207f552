// Names of every op's inputs and outputs, for the adapters: slots::GlmLinear::In::weight.
#pragma once

namespace glm
{
namespace slots
{
#include "op_slots.inc"
} // namespace slots
} // namespace glm
