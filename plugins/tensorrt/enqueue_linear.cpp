#include "adapters.h"

#include <glm_kernels/linear.h>

namespace glm
{

size_t workspaceLinear(Call const& call)
{
    using In = slots::GlmLinear::In;
    return glm_linear_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.in(In::weight, 0));
}

int enqueueLinear(Call const& call)
{
    using In = slots::GlmLinear::In;
    return glm_linear(call.input(In::x), call.input(In::weight), call.output(slots::GlmLinear::Out::y), call.in(In::x, 0),
        call.in(In::x, 1), call.in(In::weight, 0), call.integer("to_f32"), call.workspace, call.workspaceBytes,
        call.stream);
}

size_t workspaceLinearFp8(Call const& call)
{
    using In = slots::GlmLinearFp8::In;
    return glm_linear_fp8_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.in(In::weight, 0));
}

int enqueueLinearFp8(Call const& call)
{
    using In = slots::GlmLinearFp8::In;
    return glm_linear_fp8(call.input(In::x), call.input(In::weight), call.input<float>(In::scale),
        call.output(slots::GlmLinearFp8::Out::y), call.in(In::x, 0), call.in(In::x, 1), call.in(In::weight, 0),
        call.integer("to_f32"), call.workspace, call.workspaceBytes, call.stream);
}

} // namespace glm
