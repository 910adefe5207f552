#include "adapters.h"

#include <glm_kernels/norm.h>

namespace glm
{

int enqueueRmsNorm(Call const& call)
{
    using In = slots::GlmRmsNorm::In;
    return glm_rms_norm(call.input(In::x), call.input(In::weight), call.output(slots::GlmRmsNorm::Out::y),
        call.in(In::x, 0), call.in(In::x, 1), call.integer("column_offset"), call.in(In::weight, 0), call.real("eps"),
        call.stream);
}

int enqueueAddRmsNorm(Call const& call)
{
    using In = slots::GlmAddRmsNorm::In;
    using Out = slots::GlmAddRmsNorm::Out;
    return glm_add_rms_norm(call.input(In::x), call.input(In::residual), call.input(In::weight), call.output(Out::y),
        call.output(Out::sum), call.in(In::x, 0), call.in(In::x, 1), call.real("eps"), call.stream);
}

int enqueueSiluMul(Call const& call)
{
    using Out = slots::GlmSiluMul::Out;
    return glm_silu_mul(
        call.input(slots::GlmSiluMul::In::x), call.output(Out::y), call.out(Out::y, 0), call.out(Out::y, 1), call.stream);
}

int enqueueDraftInput(Call const& call)
{
    using In = slots::GlmDraftInput::In;
    return glm_draft_input(call.input(In::table), call.input<int32_t>(In::token_ids), call.input(In::hidden),
        call.input(In::token_norm), call.input(In::hidden_norm), call.output(slots::GlmDraftInput::Out::joined),
        call.in(In::hidden, 0), call.in(In::table, 0), call.in(In::hidden, 1), call.real("eps"), call.stream);
}

} // namespace glm
