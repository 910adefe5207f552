#include "adapters.h"

#include <glm_kernels/collectives.h>

namespace glm
{

size_t workspaceAllReduce(Call const& call)
{
    using In = slots::GlmAllReduce::In;
    return glm_all_reduce_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.integer("num_ranks"));
}

int enqueueAllReduce(Call const& call)
{
    using In = slots::GlmAllReduce::In;
    return glm_all_reduce(call.input(In::x), call.output(slots::GlmAllReduce::Out::y), call.in(In::x, 0), call.in(In::x, 1),
        call.integer("num_ranks"), call.workspace, call.workspaceBytes, call.stream);
}

size_t workspaceAllReduceAddRmsNorm(Call const& call)
{
    using In = slots::GlmAllReduceAddRmsNorm::In;
    return glm_all_reduce_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.integer("num_ranks"));
}

int enqueueAllReduceAddRmsNorm(Call const& call)
{
    using In = slots::GlmAllReduceAddRmsNorm::In;
    using Out = slots::GlmAllReduceAddRmsNorm::Out;
    return glm_all_reduce_add_rms_norm(call.input(In::x), call.input(In::residual), call.input(In::weight),
        call.output(Out::y), call.output(Out::sum), call.in(In::x, 0), call.in(In::x, 1), call.real("eps"),
        call.integer("num_ranks"), call.workspace, call.workspaceBytes, call.stream);
}

size_t workspaceAllGatherColumns(Call const& call)
{
    using In = slots::GlmAllGatherColumns::In;
    return glm_all_gather_columns_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.integer("num_ranks"));
}

int enqueueAllGatherColumns(Call const& call)
{
    using In = slots::GlmAllGatherColumns::In;
    return glm_all_gather_columns(call.input<float>(In::x), call.output<float>(slots::GlmAllGatherColumns::Out::y),
        call.in(In::x, 0), call.in(In::x, 1), call.integer("num_ranks"), call.workspace, call.workspaceBytes, call.stream);
}

size_t workspaceHeadBest(Call const& call)
{
    using In = slots::GlmHeadBest::In;
    return glm_head_best_workspace_bytes(call.in(In::x, 0), call.in(In::x, 1), call.in(In::weight, 0));
}

// The input `rank` lies on the device; which rows are valid must be known when the kernel is launched, so the group says it.
int enqueueHeadBest(Call const& call)
{
    using In = slots::GlmHeadBest::In;
    using Out = slots::GlmHeadBest::Out;
    int const vocab = call.in(In::weight, 0);
    return glm_head_best(call.input(In::x), call.input(In::weight), call.output<float>(Out::value),
        call.output<int32_t>(Out::ids), call.in(In::x, 0), call.in(In::x, 1), vocab, glm_collectives_rank() * vocab,
        call.integer("valid_vocab"), call.workspace, call.workspaceBytes, call.stream);
}

size_t workspaceBestOfRanks(Call const& call)
{
    return glm_best_of_ranks_workspace_bytes(call.in(slots::GlmBestOfRanks::In::value, 0), call.integer("num_ranks"));
}

int enqueueBestOfRanks(Call const& call)
{
    using In = slots::GlmBestOfRanks::In;
    return glm_best_of_ranks(call.input<float>(In::value), call.input<int32_t>(In::ids),
        call.output<int32_t>(slots::GlmBestOfRanks::Out::best), call.in(In::value, 0), call.integer("num_ranks"),
        call.workspace, call.workspaceBytes, call.stream);
}

} // namespace glm

// The group of this process, for the runtime: the entries of glm_kernels/collectives.h, whose own symbols stay inside.
#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

GLM_EXPORT int glm_mtp_collectives_unique_id(void* id)
{
    return glm_collectives_unique_id(id);
}

GLM_EXPORT int glm_mtp_collectives_init(void const* id, int rank, int numRanks)
{
    return glm_collectives_init(id, rank, numRanks);
}

GLM_EXPORT int glm_mtp_collectives_set_communicator(void* communicator, int rank, int numRanks)
{
    return glm_collectives_set_communicator(communicator, rank, numRanks);
}

GLM_EXPORT int64_t glm_mtp_collectives_direct_bytes()
{
    return glm_collectives_direct_bytes();
}

GLM_EXPORT int glm_mtp_collectives_check()
{
    return glm_collectives_check();
}

GLM_EXPORT int glm_mtp_collectives_abort()
{
    return glm_collectives_abort();
}

GLM_EXPORT int glm_mtp_collectives_close()
{
    return glm_collectives_close();
}

// Words for the last failure of these on the calling thread.
GLM_EXPORT char const* glm_mtp_collectives_last_error()
{
    return glm_kernels_last_error();
}
