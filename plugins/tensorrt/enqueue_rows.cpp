#include "adapters.h"

#include <glm_kernels/rows.h>

namespace glm
{

int enqueueStepRows(Call const& call)
{
    using In = slots::GlmStepRows::In;
    using Out = slots::GlmStepRows::Out;
    return glm_step_rows(call.input<int32_t>(In::token_ids), call.input<int32_t>(In::row_offsets),
        call.input<int32_t>(In::num_drafts), call.input<int32_t>(In::draft_tokens),
        call.input<int32_t>(In::cache_lengths), call.output<int32_t>(Out::row_token_ids),
        call.output<int32_t>(Out::positions), call.output<int32_t>(Out::row_requests),
        call.output<int32_t>(Out::logit_rows), call.in(In::token_ids, 0), call.in(In::num_drafts, 0),
        call.integer("num_slots"), call.in(In::draft_tokens, 1), call.stream);
}

int enqueueShiftRows(Call const& call)
{
    using In = slots::GlmShiftRows::In;
    using Out = slots::GlmShiftRows::Out;
    return glm_shift_rows(call.input<int32_t>(In::row_token_ids), call.input<int32_t>(In::row_offsets),
        call.input<int32_t>(In::num_drafts), call.input<int32_t>(In::num_accepted), call.input<int32_t>(In::committed),
        call.input<int32_t>(In::next_prompt_token), call.input<int32_t>(In::cache_lengths),
        call.output<int32_t>(Out::shifted), call.output<int32_t>(Out::last_rows),
        call.output<int32_t>(Out::next_positions), call.output<int32_t>(Out::request_ids),
        call.in(In::row_token_ids, 0), call.in(In::num_drafts, 0), call.in(In::committed, 1), call.stream);
}

} // namespace glm
