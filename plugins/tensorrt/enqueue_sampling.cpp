#include "adapters.h"

#include <glm_kernels/penalties.h>
#include <glm_kernels/sampling.h>

#include <algorithm>

namespace glm
{

int enqueueMaskLogits(Call const& call)
{
    using In = slots::GlmMaskLogits::In;
    // While a builder times the op nobody would end its wait.
    auto ticket = [&](int slot) { return call.building ? nullptr : call.input<int32_t>(slot); };
    return glm_mask_logits(call.input<float>(In::logits), call.input<int32_t>(In::token_bitmask), ticket(In::mask_turn),
        ticket(In::mask_ready), call.output<float>(slots::GlmMaskLogits::Out::masked), call.in(In::token_bitmask, 0),
        call.in(In::token_bitmask, 1), call.in(In::logits, 1), call.stream);
}

int enqueuePenalties(Call const& call)
{
    using In = slots::GlmPenalties::In;
    return glm_penalties(call.input<float>(In::logits), call.input<int32_t>(In::draft_tokens),
        call.input<float>(In::presence_penalty), call.input<float>(In::frequency_penalty),
        call.input<float>(In::repetition_penalty), call.input<int32_t>(In::output_counts),
        call.input<int32_t>(In::prompt_mask), call.input<float>(In::logit_bias),
        call.output<float>(slots::GlmPenalties::Out::adjusted), call.in(In::output_counts, 0), call.integer("num_slots"),
        call.in(In::output_counts, 1), call.in(In::draft_tokens, 1), call.stream);
}

size_t workspaceAccept(Call const& call)
{
    return glm_accept_workspace_bytes(call.in(slots::GlmAccept::In::num_drafts, 0), call.integer("num_slots"));
}

int enqueueAccept(Call const& call)
{
    using In = slots::GlmAccept::In;
    using Out = slots::GlmAccept::Out;
    GlmAcceptArgs args{};
    args.logits = call.input<float>(In::logits);
    args.draft_tokens = call.input<int32_t>(In::draft_tokens);
    args.num_drafts = call.input<int32_t>(In::num_drafts);
    args.temperature = call.input<float>(In::temperature);
    args.top_k = call.input<int32_t>(In::top_k);
    args.top_p = call.input<float>(In::top_p);
    args.min_p = call.input<float>(In::min_p);
    args.seed = call.input<int64_t>(In::seed);
    args.sample_offset = call.input<int32_t>(In::sample_offset);
    args.in_thinking_phase = call.input<uint8_t>(In::in_thinking_phase);
    args.relaxed_delta = call.input<float>(In::relaxed_delta);
    args.num_accepted = call.output<int32_t>(Out::num_accepted);
    args.next_tokens = call.output<int32_t>(Out::next_tokens);
    args.committed = call.output<int32_t>(Out::committed);
    args.num_requests = call.in(In::num_drafts, 0);
    args.num_slots = call.integer("num_slots");
    args.vocab_size = call.in(In::logits, 1);
    args.draft_width = call.in(In::draft_tokens, 1);
    args.relaxed_topk = call.integer("relaxed_topk");
    std::vector<int32_t> const& ends = call.list("thinking_end_ids");
    constexpr size_t capacity = sizeof(args.thinking_end_ids) / sizeof(args.thinking_end_ids[0]);
    if (ends.size() > capacity)
    {
        throw std::runtime_error("thinking_end_ids has " + std::to_string(ends.size()) + " ids, at most "
            + std::to_string(capacity) + " are supported");
    }
    args.num_thinking_end_ids = static_cast<int32_t>(ends.size());
    std::copy(ends.begin(), ends.end(), args.thinking_end_ids);
    return glm_accept(&args, call.workspace, call.workspaceBytes, call.stream);
}

int enqueueTokenLogprobs(Call const& call)
{
    using In = slots::GlmTokenLogprobs::In;
    using Out = slots::GlmTokenLogprobs::Out;
    return glm_token_logprobs(call.input<float>(In::logits), call.input<int32_t>(In::committed),
        call.output<float>(Out::logprobs), call.output<int32_t>(Out::top_ids), call.output<float>(Out::top_logprobs),
        call.in(In::committed, 0), call.in(In::committed, 1), call.in(In::logits, 1), call.integer("top_n"), call.stream);
}

} // namespace glm
