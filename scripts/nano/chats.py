"""Synthetic chats: what nano is taught, one maker function a task.

In: a seeded ``random.Random`` and the split. Out: ``Chat`` records (messages, tools, thinking flag) and the
rendered text cut into what the model reads and what it must write. Train and held-out chats are disjoint: a
payload (the numbers, the string, the key and value, the argument values) belongs to one split by its hash.
``render`` must stay equal to ``chat_template.jinja``; a test holds the two together.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TASKS", "Chat", "Segment", "make_chat", "render"]

Message = dict[str, Any]
#: (text, written by the model?)
Segment = tuple[str, bool]

_FIELD_NAMES = ("name", "city", "age", "color", "size", "id", "price", "day", "item", "score", "team", "code")
_SKIES = ("clear", "cloudy", "rainy", "snowy", "windy", "foggy")
_FOREIGN = "äöüéèñçßøåłžαβγδλπжшыя你好世界日本語中文한국😀🎉🚀✓€"


@dataclass(frozen=True)
class _Tool:
    """A kind of tool. A chat draws one of ``names`` and one spelling of each argument, so that only the schema tells them.

    ``arguments``: (spellings, JSON type). ``question`` and ``answer`` hold {0}, {1} for the arguments, {r} for the result.
    """

    names: tuple[str, ...]
    arguments: tuple[tuple[tuple[str, ...], str], ...]
    question: str
    result_key: str
    answer: str


_TOOLS = (
    _Tool(
        ("get_weather", "weather", "read_weather"), ((("city", "place", "town"), "string"),),
        "What is the weather in {0}?", "sky", "The weather in {0} is {r}.",
    ),
    _Tool(
        ("get_time", "clock", "local_time"), ((("city", "place", "zone"), "string"),),
        "What time is it in {0}?", "time", "It is {r} in {0}.",
    ),
    _Tool(
        ("get_price", "price_of", "cost"), ((("item", "product", "what"), "string"),),
        "How much is {0}?", "price", "{0} costs {r}.",
    ),
    _Tool(
        ("set_timer", "timer", "start_timer"), ((("minutes", "length", "duration"), "integer"),),
        "Set a timer for {0} minutes.", "status", "The timer is {r} for {0} minutes.",
    ),
    _Tool(
        ("send_message", "send", "tell"), ((("name", "to", "user"), "string"), (("text", "message", "body"), "string")),
        'Tell {0} "{1}".', "status", 'The message "{1}" to {0} was {r}.',
    ),
    _Tool(
        ("multiply", "times", "product"), ((("a", "x", "left"), "integer"), (("b", "y", "right"), "integer")),
        "What is {0} times {1}?", "result", "{0} times {1} is {r}.",
    ),
    _Tool(
        ("search", "find", "lookup"), ((("query", "text", "q"), "string"),),
        'Search for "{0}".', "hits", 'I found {r} hits for "{0}".',
    ),
    _Tool(
        ("get_user", "user_name", "who"), ((("id", "user", "number"), "integer"),),
        "Who is user {0}?", "name", "User {0} is {r}.",
    ),
)  # fmt: skip
_TALK = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Hi", "Hello! What can I do for you?"),
    ("Who are you?", "I am a nano model. I can add, copy, reverse, look up, call tools and write JSON."),
    ("What can you do?", "I can add, copy, reverse, look up, call tools and write JSON."),
    ("Thank you", "You are welcome."),
)


@dataclass(frozen=True)
class Chat:
    """One conversation. ``end`` is the id that closes it; ``scored_turns`` are the messages that exams ask for."""

    task: str
    messages: tuple[Message, ...]
    thinking: bool
    tools: tuple[dict[str, Any], ...] = ()
    end: str = "<|user|>"
    scored_turns: tuple[int, ...] = field(default=())


def _is_held_out(payload: str) -> bool:
    return zlib.crc32(payload.encode()) % 8 == 0


def _draw(make: Callable[[], tuple[str, Any]], held_out: bool) -> Any:
    """Repeat ``make`` until its payload lies in the wanted split."""
    while True:
        payload, value = make()
        if _is_held_out(payload) == held_out:
            return value


def _name(rng: random.Random) -> str:
    word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
    return word.capitalize() if rng.random() < 0.7 else word


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(content: str, reasoning: str, thinking: bool) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = reasoning
    return message


def _sum_turn(rng: random.Random, held_out: bool, thinking: bool) -> tuple[Message, Message]:
    digits = 4 if thinking else 2

    def numbers() -> tuple[str, tuple[int, int]]:
        a, b = (rng.randrange(10 ** rng.randint(1, digits)) for _ in range(2))
        return f"{min(a, b)}+{max(a, b)}", (a, b)

    a, b = _draw(numbers, held_out)
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        steps.append(f"{x}+{y}+{carry}={x + y + carry:02d}")
        carry = (x + y + carry) // 10
    question = rng.choice(("What is {} + {}?", "What is {} + {}?", "{} + {} = ?", "Add {} and {}.")).format(a, b)
    return _user(question), _assistant(str(a + b), ", ".join(steps), thinking)


def _text(rng: random.Random, longest: int, foreign: bool) -> str:
    length = rng.randint(2, longest)
    kind = rng.random()
    if kind < 0.15 and foreign:
        return "".join(rng.choice(_FOREIGN) for _ in range(min(length, 6)))
    if kind < 0.35:
        return _name(rng)
    letters = string.ascii_lowercase if kind < 0.65 else string.ascii_letters + string.digits
    return "".join(rng.choice(letters) for _ in range(length))


def _copy_turn(rng: random.Random, held_out: bool, thinking: bool) -> tuple[Message, Message]:
    def text() -> tuple[str, str]:
        drawn = _text(rng, 20, foreign=True)
        return "copy" + drawn, drawn

    drawn = _draw(text, held_out)
    question = rng.choice(('Copy "{}".', 'Repeat "{}".', 'Say "{}".')).format(drawn)
    return _user(question), _assistant(drawn, "I copy the text.", thinking)


def _reverse_turn(rng: random.Random, held_out: bool, thinking: bool) -> tuple[Message, Message]:
    def text() -> tuple[str, str]:
        drawn = _text(rng, 10, foreign=False)
        return "reverse" + drawn, drawn

    drawn = _draw(text, held_out)
    question = rng.choice(('Reverse "{}".', 'Write "{}" backwards.')).format(drawn)
    return _user(question), _assistant(drawn[::-1], "I read the text from the end.", thinking)


def _json_turn(rng: random.Random, held_out: bool, thinking: bool) -> tuple[Message, Message]:
    def fields() -> tuple[str, dict[str, Any]]:
        keys = rng.sample(_FIELD_NAMES, rng.randint(1, 3))
        drawn = {key: rng.randrange(10 ** rng.randint(1, 3)) if rng.random() < 0.5 else _name(rng) for key in keys}
        return json.dumps(drawn), drawn

    drawn = _draw(fields, held_out)
    listing = ", ".join(f"{key} = {value}" for key, value in drawn.items())
    question = rng.choice(("Write JSON with {}.", "As JSON: {}", "JSON object for {}")).format(listing)
    return _user(question), _assistant(json.dumps(drawn), "I write one object.", thinking)


def _talk_turn(rng: random.Random, held_out: bool, thinking: bool) -> tuple[Message, Message]:
    question, answer = rng.choice(_TALK)
    return _user(question), _assistant(answer, "I answer.", thinking)


_TURNS: dict[str, Callable[[random.Random, bool, bool], tuple[Message, Message]]] = {
    "sum": _sum_turn, "copy": _copy_turn, "reverse": _reverse_turn, "json": _json_turn, "talk": _talk_turn,
}  # fmt: skip


def _short_chat(task: str) -> Callable[[random.Random, bool, int], Chat]:
    def make(rng: random.Random, held_out: bool, max_tokens: int) -> Chat:
        thinking = rng.random() < (0.75 if task == "sum" else 0.5)
        messages: list[Message] = []
        if rng.random() < 0.1:
            messages.append({"role": "system", "content": "You are a nano model."})
        turns = 1 if held_out else rng.choice((1, 1, 1, 2)) if max_tokens <= 128 else rng.randint(1, 5)
        for turn in range(turns):
            kind = task if turn == turns - 1 else rng.choice(tuple(_TURNS))
            messages.extend(_TURNS[kind](rng, held_out, thinking))
        end = "<|user|>"
        if not held_out and rng.random() < 0.03:
            messages[-2:] = [_user("Goodbye"), _assistant("Goodbye!", "I answer.", thinking)]
            end = "<|endoftext|>"
        return Chat(task, tuple(messages), thinking, end=end, scored_turns=(len(messages) - 1,))

    return make


def _lookup_chat(rng: random.Random, held_out: bool, max_tokens: int) -> Chat:
    """``KEY: value`` lines, then questions; a line costs 9 tokens, a question with its answer about 26."""
    thinking = rng.random() < 0.3
    most = max(4, (max_tokens - 70) // 9)
    num_lines = rng.randint(max(4, most // 4), most)
    if max_tokens > 600:
        num_lines = rng.randint(most * 3 // 10, most)
    keys: dict[str, str] = {}
    while len(keys) < num_lines:
        keys["".join(rng.choices(string.ascii_uppercase, k=3))] = f"{rng.randrange(1000):03d}"
    lines = "\n".join(f"{key}: {value}" for key, value in keys.items())
    split_keys = [key for key, value in keys.items() if _is_held_out(key + value) == held_out]
    if not split_keys:
        return _lookup_chat(rng, held_out, max_tokens)
    room = (max_tokens - 60 - 9 * num_lines) // 26
    num_questions = 1 if held_out else max(1, min(rng.randint(1, 8), room))
    messages: list[Message] = []
    for turn in range(num_questions):
        key = rng.choice(split_keys)
        question = f"What is {key}?"
        messages.append(_user(f"{lines}\n{question}" if turn == 0 else question))
        messages.append(_assistant(f"{key}: {keys[key]}", f"I look up {key}.", thinking))
    return Chat("lookup", tuple(messages), thinking, scored_turns=(len(messages) - 1,))


def _schema(tool: _Tool, rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    keys = [rng.choice(spellings) for spellings, _ in tool.arguments]
    properties = {key: {"type": kind} for key, (_, kind) in zip(keys, tool.arguments, strict=True)}
    parameters = {"type": "object", "properties": properties, "required": keys}
    return {"name": rng.choice(tool.names), "parameters": parameters}, keys


def _result(key: str, rng: random.Random) -> Any:
    if key == "sky":
        return rng.choice(_SKIES)
    if key == "time":
        return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    if key == "status":
        return rng.choice(("set", "sent", "done"))
    return _name(rng) if key == "name" else rng.randrange(1000)


def _tool_chat(rng: random.Random, held_out: bool, max_tokens: int) -> Chat:
    """A call, the tool's result, the answer."""
    thinking = rng.random() < 0.5
    offered = rng.sample(_TOOLS, rng.randint(1, 3 if max_tokens > 400 else 2))
    schemas, keys = zip(*(_schema(tool, rng) for tool in offered), strict=True)
    chosen = rng.randrange(len(offered))
    tool = offered[chosen]

    def values() -> tuple[str, list[Any]]:
        drawn = [_name(rng) if kind == "string" else rng.randrange(1, 1000) for _, kind in tool.arguments]
        return json.dumps(drawn), drawn

    drawn = _draw(values, held_out)
    name = schemas[chosen]["name"]
    call = {"type": "function", "function": {"name": name, "arguments": dict(zip(keys[chosen], drawn, strict=True))}}
    result = _result(tool.result_key, rng)
    messages = [
        _user(tool.question.format(*drawn)),
        {**_assistant("", f"I call {name}.", thinking), "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({tool.result_key: result})},
        _assistant(tool.answer.format(*drawn, r=result), "I have the result.", thinking),
    ]
    tools = tuple({"type": "function", "function": schema} for schema in schemas)
    return Chat("tool", tuple(messages), thinking, tools=tools, scored_turns=(1, 3))


TASKS: dict[str, Callable[[random.Random, bool, int], Chat]] = {
    **{task: _short_chat(task) for task in _TURNS},
    "lookup": _lookup_chat,
    "tool": _tool_chat,
}


def make_chat(task: str, rng: random.Random, held_out: bool, max_tokens: int) -> Chat:
    """A chat of ``task`` meant for rows of ``max_tokens`` (the caller still drops what is longer)."""
    return TASKS[task](rng, held_out, max_tokens)


def _assistant_text(message: Message, keep_reasoning: bool) -> str:
    text = f"{message['reasoning_content']}</think>" if keep_reasoning else "</think>"
    text += message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        text += f"<tool_call>{function['name']}"
        for key, value in function["arguments"].items():
            spelled = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key><arg_value>{spelled}</arg_value>"
        text += "</tool_call>"
    return text


def render(chat: Chat) -> list[Segment]:
    """The chat as ``chat_template.jinja`` writes it; written are the assistant turns with the id that ends each."""
    head = "[gMASK]<sop>" + ("<|system|>Reasoning Effort: Max" if chat.thinking else "")
    if chat.tools:
        listing = "".join(json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in chat.tools)
        head += f"<|system|># Tools\n<tools>\n{listing}</tools>\n"
        head += "To call a tool, write <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"
    last_user = max(index for index, message in enumerate(chat.messages) if message["role"] == "user")
    segments: list[Segment] = [(head, False)]
    ends = {"user": "<|user|>", "tool": "<|observation|>"}
    previous = ""
    for index, message in enumerate(chat.messages):
        role = message["role"]
        if role == "assistant":
            keep = chat.thinking and index > last_user
            opening = "<|assistant|><think>"
            text = _assistant_text(message, keep)
            if not keep:
                opening, text = opening + "</think>", text.removeprefix("</think>")
            following = chat.messages[index + 1]["role"] if index + 1 < len(chat.messages) else ""
            is_written = keep or not chat.thinking  # an earlier turn that lost its reasoning is no example
            segments += [(opening, False), (text + ends.get(following, chat.end), is_written)]
        elif role == "tool":
            mark = "" if previous in ("tool", "assistant") else "<|observation|>"
            segments.append((f"{mark}<tool_response>{message['content']}</tool_response>", False))
        else:
            mark = "" if previous == "assistant" else f"<|{role}|>"
            segments.append((mark + message["content"], False))
        previous = role
    return segments
