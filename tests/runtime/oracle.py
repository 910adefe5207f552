"""What the toy model must say, written from the rules in plain loops: one token at a time, no caches, no drafts, no
batch."""

from __future__ import annotations

import math

from fake_model import END_THINK, EOS, SPECIALS, THINK, TOOL_CALL, VOCAB

from glm_mtp_export.runtime.sampling import SamplingParams

_M = 0xFFFFFFFF
_NUM_TOKENS = 256 + len(SPECIALS)


def _mix(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _M
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _M
    return x ^ (x >> 16)


def _logits(state: int) -> list[float]:
    return [
        (_mix(state ^ (v * 0x9E3779B9 & _M)) >> 8) * 2.0**-24 * 8.0 if v < _NUM_TOKENS else -math.inf
        for v in range(VOCAB)
    ]


def _contribution(token: int, position: int) -> int:
    return _mix((token * 2654435761 + position * 40503 + 1) & _M)


def _draw(logits: list[float], params: SamplingParams, seed: int, position: int) -> int:
    if params.temperature < 1e-5:
        return logits.index(max(logits))
    peak = max(logits)
    temperature = _f32(params.temperature)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda v: (-weights[v], v))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        total = math.fsum(weights[v] for v in ranked)
        kept, before = [], 0.0
        for v in ranked:
            if before < _f32(params.top_p):
                kept.append(v)
            before += weights[v] / total
        ranked = kept
    ranked = [v for v in ranked if weights[v] >= _f32(params.min_p) * weights[ranked[0]]]
    total = math.fsum(weights[v] for v in ranked)
    h = _mix((seed & _M) ^ 0x9E3779B9)
    h = _mix(h ^ ((seed >> 32) & _M))
    h = _mix(h ^ position)
    target = ((h >> 8) + 0.5) * 2.0**-24 * total
    running = 0.0
    for v in sorted(ranked):
        running += weights[v]
        if running > target:
            return v
    return max(ranked)


def _f32(x: float) -> float:
    import struct

    return struct.unpack("f", struct.pack("f", x))[0]


def _penalised(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    counts: dict[int, int] = {}
    for t in output:
        counts[t] = counts.get(t, 0) + 1
    result = []
    repetition, frequency, presence = map(
        _f32, (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    seen = set(prompt) | set(output)
    for v, x in enumerate(logits):
        bias = params.logit_bias.get(v, 0.0)
        x = -math.inf if bias <= -100 else x + _f32(bias)
        if v in seen:
            x = x / repetition if x > 0 else x * repetition
        if v in counts:
            x -= frequency * counts[v]
            x -= presence
        result.append(x)
    return result


def generate(
    prompt: list[int], params: SamplingParams, seed: int, limit: int
) -> tuple[list[int], str, list[float | None]]:
    """Output ids, finish reason, log-probability of each id (None where the host forced it)."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    tokens = list(prompt)
    state = sum(_contribution(t, i) for i, t in enumerate(tokens)) & _M
    thinking, spent = False, 0
    for t in prompt:
        if t in (THINK, END_THINK, TOOL_CALL):
            thinking = t == THINK
    logprobs: list[float | None] = []
    output: list[int] = []
    while len(output) < limit:
        raw = _logits(state)
        logits = _penalised(raw, params, prompt, output)
        if len(output) < params.min_tokens:
            logits = [-math.inf if v in stops else x for v, x in enumerate(logits)]
        token = _draw(logits, params, seed, len(output))
        forced = (
            thinking and params.thinking_budget is not None and spent == params.thinking_budget and token != END_THINK
        )
        if forced:
            token = END_THINK
        output.append(token)
        peak = max(raw)
        logprobs.append(None if forced else raw[token] - peak - math.log(math.fsum(math.exp(x - peak) for x in raw)))
        state = (state + _contribution(token, len(prompt) + len(output) - 1)) & _M
        if token == THINK and not thinking:
            thinking, spent = True, 0
        elif token in (END_THINK, TOOL_CALL):
            thinking = False
        elif thinking:
            spent += 1
        if token in stops and len(output) > params.min_tokens:
            return output, "stop", logprobs
        if _text_stops(output, params, token in stops):
            return output, "stop", logprobs
    return output, "length", logprobs


def _text_stops(output: list[int], params: SamplingParams, last_is_stop: bool) -> bool:
    """A stop string whose last character this token completed, none of it from the first min_tokens ids."""
    if not params.stop or last_is_stop:
        return False
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, sizes = "", []
    for t in output:
        hidden = t in (256, 257, 258) and params.skip_special_tokens
        piece = "" if hidden else decoder.decode(bytes([t]) if t < 256 else SPECIALS[t - 256].encode())
        text += piece
        sizes.append(len(piece))
    free = sum(sizes[: params.min_tokens])
    return any(text.find(s, free) >= 0 for s in params.stop)
