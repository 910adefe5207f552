#include "adapters.h"

#include <glm_kernels/head.h>

namespace glm
{

size_t workspaceHeadLogits(Call const& call)
{
    using In = slots::GlmHeadLogits::In;
    return glm_head_logits_workspace_bytes(call.in(In::rows, 0), call.in(In::x, 1), call.in(In::weight, 0));
}

int enqueueHeadLogits(Call const& call)
{
    using In = slots::GlmHeadLogits::In;
    return glm_head_logits(call.input(In::x), call.input<int32_t>(In::rows), call.input(In::weight),
        call.output<float>(slots::GlmHeadLogits::Out::logits), call.in(In::x, 0), call.in(In::rows, 0), call.in(In::x, 1),
        call.in(In::weight, 0), call.integer("valid_vocab"), call.workspace, call.workspaceBytes, call.stream);
}

size_t workspaceHeadArgmax(Call const& call)
{
    using In = slots::GlmHeadArgmax::In;
    return glm_head_argmax_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.in(In::weight, 0));
}

int enqueueHeadArgmax(Call const& call)
{
    using In = slots::GlmHeadArgmax::In;
    return glm_head_argmax(call.input(In::x), call.input(In::weight), call.output<int32_t>(0), call.in(In::x, 0),
        call.in(In::x, 1), call.in(In::weight, 0), call.integer("valid_vocab"), call.workspace, call.workspaceBytes,
        call.stream);
}

} // namespace glm
