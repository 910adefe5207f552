// Which adapter serves which op of the table. An op that needs no scratch memory has no workspace function.
#include "adapters.h"

namespace glm
{

std::vector<Binding> const& bindings()
{
    static std::vector<Binding> const list = {
        {"GlmStepRows", nullptr, enqueueStepRows},
        {"GlmShiftRows", nullptr, enqueueShiftRows},
        {"GlmRmsNorm", nullptr, enqueueRmsNorm},
        {"GlmAddRmsNorm", nullptr, enqueueAddRmsNorm},
        {"GlmSiluMul", nullptr, enqueueSiluMul},
        {"GlmDraftInput", nullptr, enqueueDraftInput},
        {"GlmLinear", workspaceLinear, enqueueLinear},
        {"GlmLinearFp8", workspaceLinearFp8, enqueueLinearFp8},
        {"GlmIndexer", workspaceIndexer, enqueueIndexer},
        {"GlmMlaAttention", workspaceMlaAttention, enqueueMlaAttention},
        {"GlmRouter", workspaceRouter, enqueueRouter},
        {"GlmExperts", workspaceExperts, enqueueExperts},
        {"GlmExpertsFp8", workspaceExpertsFp8, enqueueExpertsFp8},
        {"GlmExpertsNvfp4", workspaceExpertsNvfp4, enqueueExpertsNvfp4},
        {"GlmHeadLogits", workspaceHeadLogits, enqueueHeadLogits},
        {"GlmHeadArgmax", workspaceHeadArgmax, enqueueHeadArgmax},
        {"GlmMaskLogits", nullptr, enqueueMaskLogits},
        {"GlmPenalties", nullptr, enqueuePenalties},
        {"GlmAccept", workspaceAccept, enqueueAccept},
        {"GlmTokenLogprobs", nullptr, enqueueTokenLogprobs},
        {"GlmAllReduce", workspaceAllReduce, enqueueAllReduce},
        {"GlmAllReduceAddRmsNorm", workspaceAllReduceAddRmsNorm, enqueueAllReduceAddRmsNorm},
        {"GlmAllGatherColumns", workspaceAllGatherColumns, enqueueAllGatherColumns},
        {"GlmHeadBest", workspaceHeadBest, enqueueHeadBest},
        {"GlmBestOfRanks", workspaceBestOfRanks, enqueueBestOfRanks},
    };
    return list;
}

} // namespace glm
