"""The checkpoint's own chat template, rendered as Hugging Face `apply_chat_template` renders it.

In: `chat_template.jinja` (or `chat_template` in tokenizer_config.json) and a conversation. Out: prompt text.

The environment is that of transformers 5: immutable sandbox, trim_blocks, lstrip_blocks, loop controls, a `generation`
block, `tojson` without ASCII or HTML escapes, `raise_exception`, `strftime_now`, and only plain JSON data inside.
Content reaches the template as the caller gave it; `messages_for_template` states the two exceptions for HTTP clients.

Templates come with a checkpoint and are not trusted: rendering runs under the sandbox with a time limit, a limit on the
text it may build and on numbers it may compute. A broken template raises `CheckpointError`, one that refuses the
conversation (`raise_exception`) or exceeds a limit on it `RequestError`.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.utils
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm_mtp_export.errors import CheckpointError, RequestError
from glm_mtp_export.runtime.tokenizer import Tokenizer

__all__ = [
    "MAX_PROMPT_CHARACTERS",
    "MAX_RENDER_SECONDS",
    "ChatTemplate",
    "check_template_variables",
    "messages_for_template",
]

MAX_PROMPT_CHARACTERS = 16_000_000  # a million tokens of long words, and any text on the way there
MAX_RENDER_SECONDS = 10.0
_MAX_INTEGER_BITS = 4096
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _LimitError(Exception):
    """A template computed something larger than allowed."""


class _TimeLimitError(Exception):
    """Raised inside the rendering thread when its time is over."""


class ChatTemplate:
    """A compiled template with the named tokens it may print. Safe to share between threads."""

    def __init__(
        self, source: str, *, named_tokens: Mapping[str, str] | None = None, origin: str = "chat_template.jinja"
    ) -> None:
        self.source = source
        self._named_tokens = dict(named_tokens or {})
        self._origin = origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin}: line {error.lineno}: {str(error.message).rstrip('.')}. Fetch the template again."
            ) from error

    @classmethod
    def load(cls, directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read the template of a checkpoint folder: the .jinja file first, as transformers does."""
        path = Path(directory) / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), named_tokens=tokenizer.named_tokens, origin=str(path))
        found = tokenizer.config.get("chat_template")
        if isinstance(found, list):  # older files: [{"name": "default", "template": ...}, ...]
            found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
        if not isinstance(found, str):
            raise CheckpointError(
                f"{path}: not found, and tokenizer_config.json has no chat_template. Copy the checkpoint's template "
                "here; plain completions work without it."
            )
        return cls(found, named_tokens=tokenizer.named_tokens, origin="tokenizer_config.json: chat_template")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,  # a variable may be called `self`
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Prompt text. `variables` (enable_thinking, clear_thinking, ...) reach the template under their names."""
        if not messages:
            raise RequestError("messages is empty. Send at least one message.")
        chat = [_with_reasoning_names({k: v for k, v in _plain(m).items() if v is not None}) for m in messages]
        context = {**self._named_tokens, **_plain(variables)}
        context |= {"messages": chat, "tools": _plain(tools), "documents": None}
        context["add_generation_prompt"] = add_generation_prompt
        return self._render_within_limits(context)

    def _render_within_limits(self, context: dict[str, Any]) -> str:
        try:
            return _run_within(MAX_RENDER_SECONDS, lambda: _limited_join(self._template.generate(context)))
        except _TimeLimitError:
            raise RequestError(
                f"{self._origin}: rendering took more than {MAX_RENDER_SECONDS:g} s. Send a shorter conversation, "
                "or use the checkpoint's original template."
            ) from None
        except (_LimitError, MemoryError) as error:
            raise RequestError(f"{self._origin}: {error or 'out of memory'}. Send a shorter conversation.") from error
        except jinja2.exceptions.SecurityError as error:
            raise CheckpointError(
                f"{self._origin}: does what the sandbox forbids: {error}. Use the checkpoint's original template."
            ) from error
        except jinja2.TemplateError as error:  # raise_exception, undefined values
            raise RequestError(f"The chat template refused the conversation: {error}.") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            # Templates index and join whatever the client sent; a shape they do not expect ends in one of these.
            raise RequestError(
                f"The chat template cannot render this conversation ({type(error).__name__}: {error}). "
                "Check the fields of messages and tools."
            ) from error


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Refuse a client's `chat_template_kwargs` that would take the place of the request's own fields."""
    reserved = sorted(_RESERVED_VARIABLES & variables.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs: {reserved} cannot be set. Use the request's own fields.")


def messages_for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as an OpenAI client sends them, in the form templates are written for.

    Two things differ from the wire: `tool_calls[].function.arguments` is a JSON string there and an object here, and a
    content made of text parts only is the concatenation of those texts (GLM's own template does the same for users,
    but prints the parts' repr for tool results). Everything else stays as given. A part that is not text raises
    RequestError.
    """
    converted = []
    for index, message in enumerate(messages):
        copy = dict(message)
        if isinstance(copy.get("content"), list):
            copy["content"] = "".join(_part_text(part, index) for part in copy["content"])
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_with_argument_object(call, index) for call in copy["tool_calls"]]
        converted.append(copy)
    return converted


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"messages[{index}].content: part of type {kind!r}, expected 'text'. This model reads text only."
    )


def _with_argument_object(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        function["arguments"] = {}
    elif isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"messages[{index}].tool_calls: arguments of {function.get('name')!r} is not JSON ({error}). "
                "Send the arguments string as the server returned it."
            ) from error
    if not isinstance(function["arguments"], Mapping):
        found = type(function["arguments"]).__name__
        raise RequestError(f"messages[{index}].tool_calls: arguments is {found}, expected a JSON object.")
    return {**call, "function": function}


# ---- the environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 64:
        raise _LimitError(f"tojson with indent {indent}, at most 64")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)


class _TemplateDict:
    """`dict(...)` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace(...)` that takes no underscore names, a known way out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_name(name)
        super().__setitem__(name, value)


def _check_attribute_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; at inference it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _LimitedCode(CodeGenerator):
    """`a ~ b` compiled to a call that looks at the size first: repeated doubling fits a few lines of template."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.limited_concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with every operation that can grow a value faster than it reads one held below the limits."""

    code_generator_class = _LimitedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def limited_concat(self, operands: tuple[Any, ...]) -> str:
        """The `~` operator."""
        return _limited_join(map(str, operands))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Binary operators whose result can be larger than their operands together."""
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Method calls: `'x'.ljust(10**9)`, `s.replace('a', s)`, `s.join(s)`."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_string_call(owner, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)


def _environment() -> _LimitedEnvironment:
    environment = _LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.concat = _limited_join  # type: ignore[method-assign]  # {% set %} blocks, macros
    for name in ("center", "indent", "batch", "slice"):
        environment.filters[name] = _with_small_numbers(environment.filters[name], name)
    environment.filters["replace"] = _limited_replace
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _limited_join(pieces: Iterable[str]) -> str:
    kept, total = [], 0
    for piece in pieces:
        total += len(piece)
        _check_characters(total)
        kept.append(piece)
    return "".join(kept)


def _check_characters(count: int) -> None:
    if count > MAX_PROMPT_CHARACTERS:
        raise _LimitError(f"text of more than {MAX_PROMPT_CHARACTERS} characters")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sized = (str, list, tuple)
    if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        _check_characters(len(left) + len(right))
    elif operator == "*" and isinstance(left, sized) and isinstance(right, int):
        _check_characters(len(left) * right)
    elif operator == "*" and isinstance(right, sized) and isinstance(left, int):
        _check_characters(len(right) * left)
    elif operator == "%" and isinstance(left, str):
        raise _LimitError("the % operator on text; use the format the original template uses")
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise _LimitError(f"an integer of more than {_MAX_INTEGER_BITS} bits")


def _check_string_call(text: str, method: str, args: tuple[Any, ...]) -> None:
    numbers = [a for a in args if isinstance(a, int)]
    if method in ("ljust", "rjust", "center", "zfill", "expandtabs") and numbers:
        _check_characters(max(numbers) * (text.count("\t") or 1))
    elif method == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        _check_characters(len(text) + _num_replaced(text, args[0]) * len(args[1]))
    elif method == "join" and args and isinstance(args[0], (str, list, tuple)):
        _check_characters(len(text) * len(args[0]) + sum(len(str(item)) for item in args[0]))
    elif method in ("translate", "format_map"):
        raise _LimitError(f"str.{method}, which templates may not use")


def _num_replaced(text: str, old: str) -> int:
    return text.count(old) if old else len(text) + 1


def _limited_replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    _check_characters(len(text) + _num_replaced(text, str(old)) * len(str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _with_small_numbers(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        for number in (*args, *kwargs.values()):
            if isinstance(number, int) and abs(number) > 10_000:
                raise _LimitError(f"filter {name} with {number}, at most 10000")
        return function(value, *args, **kwargs)

    return checked


def _run_within(seconds: float, work: Callable[[], str]) -> str:
    """Run `work` in a thread of its own and raise `_TimeLimitError` when it does not come back.

    A template is pure Python between two bytecodes, so an asynchronous exception ends its loops.
    """
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["text"] = work()
        except BaseException as error:  # handed to the caller, below
            outcome["error"] = error

    thread = threading.Thread(target=body, name="chat-template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeLimitError))
        thread.join(1.0)
        raise _TimeLimitError
    if "error" in outcome:
        raise outcome["error"]
    return str(outcome["text"])


# ---- plain data


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """transformers fills `reasoning_content` and `thinking` from any of the names reasoning goes under."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Only JSON types reach a template: objects have methods that the sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # subclasses (enums) back to the base type
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"
