// The adapters: one pair of functions an op, which read a call's shapes and attributes and call the kernel's C entry. They
// compute nothing. Families: rows, norm, linear, attention, experts, head, sampling, collectives.
#pragma once

#include "call.h"
#include "slots.h"

namespace glm
{

int enqueueStepRows(Call const& call);
int enqueueShiftRows(Call const& call);

int enqueueRmsNorm(Call const& call);
int enqueueAddRmsNorm(Call const& call);
int enqueueSiluMul(Call const& call);
int enqueueDraftInput(Call const& call);

size_t workspaceLinear(Call const& call);
int enqueueLinear(Call const& call);
size_t workspaceLinearFp8(Call const& call);
int enqueueLinearFp8(Call const& call);

size_t workspaceIndexer(Call const& call);
int enqueueIndexer(Call const& call);
size_t workspaceMlaAttention(Call const& call);
int enqueueMlaAttention(Call const& call);

size_t workspaceRouter(Call const& call);
int enqueueRouter(Call const& call);
size_t workspaceExperts(Call const& call);
int enqueueExperts(Call const& call);
size_t workspaceExpertsFp8(Call const& call);
int enqueueExpertsFp8(Call const& call);
size_t workspaceExpertsNvfp4(Call const& call);
int enqueueExpertsNvfp4(Call const& call);

size_t workspaceHeadLogits(Call const& call);
int enqueueHeadLogits(Call const& call);
size_t workspaceHeadArgmax(Call const& call);
int enqueueHeadArgmax(Call const& call);

int enqueueMaskLogits(Call const& call);
int enqueuePenalties(Call const& call);
size_t workspaceAccept(Call const& call);
int enqueueAccept(Call const& call);
int enqueueTokenLogprobs(Call const& call);

size_t workspaceAllReduce(Call const& call);
int enqueueAllReduce(Call const& call);
size_t workspaceAllReduceAddRmsNorm(Call const& call);
int enqueueAllReduceAddRmsNorm(Call const& call);
size_t workspaceAllGatherColumns(Call const& call);
int enqueueAllGatherColumns(Call const& call);
size_t workspaceHeadBest(Call const& call);
int enqueueHeadBest(Call const& call);
size_t workspaceBestOfRanks(Call const& call);
int enqueueBestOfRanks(Call const& call);

} // namespace glm
