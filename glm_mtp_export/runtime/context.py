"""How long prompt plus output may be, and which limit says so. Shared by the engine and by what prints a plan."""

from __future__ import annotations

from dataclasses import dataclass

from glm_mtp_export.artifact import PAGE_SIZE
from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.paging import page_count

__all__ = ["ContextLimit"]


@dataclass(frozen=True)
class ContextLimit:
    """`length` tokens of prompt and output together; `reason` names the limiting factor with its value."""

    length: int
    reason: str

    @classmethod
    def of(
        cls,
        max_position_embeddings: int,
        num_pages: int,
        num_speculative_tokens: int,
        max_total_context: int,
        max_context_length: int | None = None,
    ) -> ContextLimit:
        """The smallest of all limits. The last output token is never cached; the draft loop writes K - 1 slots past
        the end."""
        pool = num_pages * PAGE_SIZE - max(num_speculative_tokens - 1, 0) + 1
        limits = [
            (max_position_embeddings, f"max_position_embeddings {max_position_embeddings} of config.json"),
            (pool, f"the page pool of {num_pages} pages of {PAGE_SIZE} positions"),
            (max_total_context, f"max_total_context {max_total_context} of the engine profile"),
        ]
        if max_context_length is not None:
            # The block table has columns for max_context positions, and the draft loop's slots need theirs too.
            slots = page_count(max_context_length) * PAGE_SIZE - max(num_speculative_tokens - 1, 0) + 1
            length = min(max_context_length, slots)
            limits.append((length, f"max_context {max_context_length} of the engine profile"))
        return cls(*min(limits, key=lambda limit: limit[0]))

    def max_output(self, num_prompt: int, max_tokens: int | None, min_tokens: int = 0) -> int:
        """Output tokens a prompt may have; RequestError when prompt or wish is over the limit."""
        room = self.length - num_prompt
        least = 0 if max_tokens == 0 else 1
        if room < least:
            raise RequestError(
                f"The prompt has {num_prompt} tokens, the context limit is {self.length} with the output "
                f"({self.reason}). Send a prompt of at most {self.length - least} tokens."
            )
        if max_tokens is not None and max_tokens > room:
            raise RequestError(
                f"Prompt {num_prompt} + max_tokens {max_tokens} = {num_prompt + max_tokens} tokens, the context limit "
                f"is {self.length} ({self.reason}). Lower max_tokens to {room} or shorten the prompt."
            )
        if min_tokens > room:
            raise RequestError(
                f"Prompt {num_prompt} + min_tokens {min_tokens} = {num_prompt + min_tokens} tokens, the context limit "
                f"is {self.length} ({self.reason}). Lower min_tokens to {room} or shorten the prompt."
            )
        return room if max_tokens is None else max_tokens
