#include "adapters.h"

#include <glm_kernels/experts.h>
#include <glm_kernels/router.h>

namespace glm
{
namespace
{

// Hidden is x's width; the experts and their intermediate size show in w13 [E, 2I, .].
template <typename In>
size_t expertsWorkspace(Call const& call)
{
    return glm_experts_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.in(In::w13, 1) / 2,
        call.in(In::w13, 0), call.in(In::expert_ids, 1));
}

} // namespace

size_t workspaceRouter(Call const& call)
{
    using In = slots::GlmRouter::In;
    return glm_router_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.in(In::weight, 0));
}

int enqueueRouter(Call const& call)
{
    using In = slots::GlmRouter::In;
    using Out = slots::GlmRouter::Out;
    return glm_router(call.input(In::x), call.input(In::weight), call.input<float>(In::bias),
        call.output<int32_t>(Out::expert_ids), call.output<float>(Out::expert_weights), call.in(In::x, 0),
        call.in(In::x, 1), call.in(In::weight, 0), call.integer("top_k"), call.integer("n_group"),
        call.integer("topk_group"), call.integer("norm_topk_prob"), call.real("routed_scaling_factor"), call.workspace,
        call.workspaceBytes, call.stream);
}

size_t workspaceExperts(Call const& call)
{
    return expertsWorkspace<slots::GlmExperts::In>(call);
}

int enqueueExperts(Call const& call)
{
    using In = slots::GlmExperts::In;
    return glm_experts(call.input(In::x), call.input<int32_t>(In::expert_ids), call.input<float>(In::expert_weights),
        call.input(In::w13), call.input(In::w2), call.output(0), call.in(In::x, 0), call.in(In::x, 1),
        call.in(In::w13, 1) / 2, call.in(In::w13, 0), call.in(In::expert_ids, 1), call.workspace, call.workspaceBytes,
        call.stream);
}

size_t workspaceExpertsFp8(Call const& call)
{
    return expertsWorkspace<slots::GlmExpertsFp8::In>(call);
}

int enqueueExpertsFp8(Call const& call)
{
    using In = slots::GlmExpertsFp8::In;
    return glm_experts_fp8(call.input(In::x), call.input<int32_t>(In::expert_ids), call.input<float>(In::expert_weights),
        call.input(In::w13), call.input<float>(In::w13_scale), call.input(In::w2), call.input<float>(In::w2_scale),
        call.output(0), call.in(In::x, 0), call.in(In::x, 1), call.in(In::w13, 1) / 2, call.in(In::w13, 0),
        call.in(In::expert_ids, 1), call.workspace, call.workspaceBytes, call.stream);
}

size_t workspaceExpertsNvfp4(Call const& call)
{
    return expertsWorkspace<slots::GlmExpertsNvfp4::In>(call);
}

int enqueueExpertsNvfp4(Call const& call)
{
    using In = slots::GlmExpertsNvfp4::In;
    return glm_experts_nvfp4(call.input(In::x), call.input<int32_t>(In::expert_ids),
        call.input<float>(In::expert_weights), call.input(In::w13), call.input(In::w13_scale),
        call.input<float>(In::w13_global), call.input(In::w2), call.input(In::w2_scale), call.input<float>(In::w2_global),
        call.output(0), call.in(In::x, 0), call.in(In::x, 1), call.in(In::w13, 1) / 2, call.in(In::w13, 0),
        call.in(In::expert_ids, 1), call.workspace, call.workspaceBytes, call.stream);
}

} // namespace glm
