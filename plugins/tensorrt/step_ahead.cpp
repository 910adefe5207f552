// What the runtime launches around a step: the entries of glm_kernels/step_ahead.h, whose own symbols stay inside.
#include <glm_kernels/step_ahead.h>

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

GLM_EXPORT int glm_mtp_follow_step(GlmStepState const* state, int32_t const* follows, GlmCarry const* carry, void* stream)
{
    return glm_follow_step(state, follows, carry, stream);
}

GLM_EXPORT int glm_mtp_carry_step(
    GlmStepState const* state, GlmStepResults const* results, GlmCarry const* carry, void* stream)
{
    return glm_carry_step(state, results, carry, stream);
}

GLM_EXPORT int glm_mtp_spread_histories(GlmHistories const* histories, void* stream)
{
    return glm_spread_histories(histories, stream);
}

// Words for the last failure of these on the calling thread.
GLM_EXPORT char const* glm_mtp_step_ahead_last_error()
{
    return glm_kernels_last_error();
}
