"""What models write, and the messages that it means: written from the formats' rules, not recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.runtime.chat_output import ChatFormat

FUNCTIONS: dict[str, dict[str, Any] | None] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "metric": {"type": "boolean"},
            "place": {"type": "object"},
            "hours": {"type": "array"},
            "note": {"type": ["string", "null"]},
            "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "until": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "unit": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/Where"},
            "free": {},
        },
        "$defs": {"Where": {"type": "object"}},
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": None,
}

QWEN = ChatFormat(FUNCTIONS, bare_functions=True)
Call = tuple[str, str]


@dataclass(frozen=True)
class Transcript:
    """`text` as the model wrote it, and the message: content, reasoning, and calls as name and JSON text of arguments."""

    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    form: ChatFormat = QWEN


TOOLLESS = ChatFormat()
OPENED = ChatFormat(FUNCTIONS, opens_thought=True, bare_functions=True)
OPENED_TOOLLESS = ChatFormat(opens_thought=True)
UNSPLIT = ChatFormat(FUNCTIONS, splits_reasoning=False)
UNSPLIT_OPENED = ChatFormat(FUNCTIONS, opens_thought=True, splits_reasoning=False)
ONE_CALL = ChatFormat(FUNCTIONS, parallel_calls=False)
HERMES = ChatFormat(FUNCTIONS)


def xml(parameter: str, value: str) -> str:
    """A Qwen call of `weather` with one parameter."""
    return f"<tool_call>\n<function=weather>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"


NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW_CALL = ("now", "{}")
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS_CALL = ("weather", '{"city": "Paris"}')
PARIS_XML = xml("city", "Paris")


def T(name: str, text: str, *, form: ChatFormat | None = None, **message: Any) -> Transcript:
    return Transcript(name, text, **message) if form is None else Transcript(name, text, form=form, **message)


CONTENT = [
    T("nothing", ""),
    T("nothing, without tools", "", form=TOOLLESS),
    T("a word", "Hello", content="Hello"),
    T("whitespace around content stays", " \n Hello \n", content=" \n Hello \n"),
    T("only whitespace", "\n\n", content="\n\n"),
    T("many scripts", "Ünï 日本語 🦜👩‍👩‍👧 ꙮ", content="Ünï 日本語 🦜👩‍👩‍👧 ꙮ"),
    T("comparison signs", "1 < 2 <= 3 << 4", content="1 < 2 <= 3 << 4"),
    T("markup", "<b>bold</b> <tool> <think", content="<b>bold</b> <tool> <think"),
    T("a tag is begun and not finished", "see <tool_cal", content="see <tool_cal"),
    T("a tag inside words", "a<tool_calls>b", content="a<tool_calls>b"),
    T("a closing tag alone", "a </tool_call> b", content="a </tool_call> b"),
    T("an end of thought alone", "a </think> b", content="a </think> b"),
    T("a thought in the middle is content", "a <think>b</think> c", content="a <think>b</think> c"),
    T("calls are text without tools", PARIS, content=PARIS, form=TOOLLESS),
    T("Qwen's calls are text without tools", PARIS_XML, content=PARIS_XML, form=TOOLLESS),
    T("NUL and other control characters", "a\x00b\x1b[0m\r\n", content="a\x00b\x1b[0m\r\n"),
]

REASONING = [
    T("a thought", "<think>\nHm.\n</think>\n\nYes.", reasoning="Hm.", content="Yes."),
    T("a thought without tools", "<think>\nHm.\n</think>\n\nYes.", reasoning="Hm.", content="Yes.", form=TOOLLESS),
    T("no line breaks", "<think>Hm.</think>Yes.", reasoning="Hm.", content="Yes."),
    T("whitespace before the thought", " \n<think>Hm.</think> Yes. ", reasoning="Hm.", content="Yes. "),
    T("an empty thought", "<think>\n\n</think>\n\nYes.", content="Yes."),
    T("paragraphs", "<think>\na\n\nb \n c\n</think>d", reasoning="a\n\nb \n c", content="d"),
    T("markup in a thought", "<think>if a < b </thin </think >.</think>x",
      reasoning="if a < b </thin </think >.", content="x"),
    T("the prompt opened it", "Hm.\n</think>\n\nYes.", reasoning="Hm.", content="Yes.", form=OPENED),
    T("opened, without tools", "\n\nHm.</think>Yes.", reasoning="Hm.", content="Yes.", form=OPENED_TOOLLESS),
    T("opened, and the model opens it again", "\n<think>\nHm.</think>Yes.", reasoning="Hm.", content="Yes.", form=OPENED),
    T("opened and closed at once", "</think>\n\nYes.", content="Yes.", form=OPENED),
    T("a second thought is content", "<think>a</think>b<think>c</think>", reasoning="a", content="b<think>c</think>"),
    T("never closed", "<think>\nHm, and", reasoning="Hm, and"),
    T("never closed, opened", "Hm, and \n", reasoning="Hm, and \n", form=OPENED),
    T("cut off in the end marker", "<think>Hm</thi", reasoning="Hm</thi"),
    T("cut off in the beginning marker", "<thi", content="<thi"),
    T("nothing behind it", "<think>Hm.</think>\n", reasoning="Hm."),
    T("scripts in a thought", "<think>日本🦜</think>語", reasoning="日本🦜", content="語"),
    T("left in the content", "<think>\nHm.\n</think>\n\nYes.", content="<think>\nHm.\n</think>\n\nYes.", form=UNSPLIT),
    T("left in the content, opened", "Hm. </think> Yes.", content="Hm. </think> Yes.", form=UNSPLIT_OPENED),
    T("left in the content, with a call", f"<think> {NOW} </think>\n{PARIS}", form=UNSPLIT,
      content=f"<think> {NOW} </think>", calls=(PARIS_CALL,)),
    T("a drafted call is a thought", f"<think>First {NOW}?</think>\n\nNo.", reasoning=f"First {NOW}?", content="No."),
    T("a drafted call of Qwen's", f"Try {PARIS_XML}\n</think>\n\n{PARIS_XML}", form=OPENED,
      reasoning=f"Try {PARIS_XML}", calls=(PARIS_CALL,)),
    T("a call ends a thought that never ends", f"<think>\nI must look.\n{PARIS}",
      reasoning="I must look.", calls=(PARIS_CALL,)),
    T("so does Qwen's", f"I must look.\n\n{PARIS_XML}", reasoning="I must look.", calls=(PARIS_CALL,), form=OPENED),
    T("a broken call does not", "Look.\n<tool_call>\n<function=weather>\n<par", form=OPENED,
      reasoning="Look.\n<tool_call>\n<function=weather>\n<par"),
    T("nor does an unknown one", 'Look. <tool_call>{"name": "x", "arguments": {}}</tool_call>', form=OPENED,
      reasoning='Look. <tool_call>{"name": "x", "arguments": {}}</tool_call>'),
]  # fmt: skip

HERMES_CALLS = [
    T("a call", PARIS, calls=(PARIS_CALL,)),
    T("a call on one line", '<tool_call>{"name":"weather","arguments":{"city":"Paris"}}</tool_call>',
      calls=(("weather", '{"city":"Paris"}'),)),
    T("whitespace around it", f"\n\n{PARIS}\n\n", calls=(PARIS_CALL,)),
    T("text before it", f"I look.\n\n{PARIS}", content="I look.", calls=(PARIS_CALL,)),
    T("text behind it", f"{PARIS}\n\nDone. ", content="Done.", calls=(PARIS_CALL,)),
    T("text around it", f"One.\n{PARIS}\nTwo.", content="One.\nTwo.", calls=(PARIS_CALL,)),
    T("thought, text, call", f"<think>\nHm.\n</think>\n\nI look.\n{PARIS}",
      reasoning="Hm.", content="I look.", calls=(PARIS_CALL,)),
    T("two calls", f"{PARIS}\n{NOW}", calls=(PARIS_CALL, NOW_CALL)),
    T("three calls without whitespace", PARIS + NOW + PARIS, calls=(PARIS_CALL, NOW_CALL, PARIS_CALL)),
    T("only the first of two", f"a {PARIS}\n{NOW} b", content="a b", calls=(PARIS_CALL,), form=ONE_CALL),
    T("only the first of two, Qwen's", f"{PARIS_XML}\n{PARIS_XML}", calls=(PARIS_CALL,), form=ONE_CALL),
    T("no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=(NOW_CALL,)),
    T("null arguments", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=(NOW_CALL,)),
    T("Llama's name for arguments", '<tool_call>{"name": "weather", "parameters": {"days": 2}}</tool_call>',
      calls=(("weather", '{"days": 2}'),)),
    T("arguments first", '<tool_call>{"arguments": {"days": 2}, "name": "weather"}</tool_call>',
      calls=(("weather", '{"days": 2}'),)),
    T("other keys", '<tool_call>{"id": 7, "name": "now", "arguments": {}}</tool_call>', calls=(NOW_CALL,)),
    T("other keys behind", '<tool_call>{"name": "now", "arguments": {}, "id": "}"}</tool_call>', calls=(NOW_CALL,)),
    T("arguments as a string", '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 2}"}</tool_call>',
      calls=(("weather", '{"days": 2}'),)),
    T("nested arguments", '<tool_call>{"name": "weather", "arguments": {"place": {"a": [1, {"b": "}"}]}}}</tool_call>',
      calls=(("weather", '{"place": {"a": [1, {"b": "}"}]}}'),)),
    T("tags and quotes in a string",
      '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\"}<"}}</tool_call>',
      calls=(("weather", '{"city": "</tool_call>\\"}<"}'),)),
    T("line breaks in a string", '<tool_call>{"name": "weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
      calls=(("weather", '{"city": "a\\nb\\tc"}'),)),
    T("scripts and escapes", '<tool_call>{"name": "weather", "arguments": {"city": "東京\\ud83e\\udd9c🦜"}}</tool_call>',
      calls=(("weather", '{"city": "東京\\ud83e\\udd9c🦜"}'),)),
    T("an escaped name", '<tool_call>{"name": "n\\u006fw", "arguments": {}}</tool_call>', calls=(NOW_CALL,)),
    T("much whitespace", '<tool_call> \n\t{ "name" : "now" ,\n "arguments" : { } }\n\n</tool_call>',
      calls=(("now", "{ }"),)),
    T("the end tag is missing", PARIS.removesuffix("\n</tool_call>"), calls=(PARIS_CALL,)),
    T("the end tag is missing before the next", PARIS.removesuffix("\n</tool_call>") + NOW, calls=(PARIS_CALL, NOW_CALL)),
    T("the last bracket is missing", '<tool_call>{"name": "now", "arguments": {}\n</tool_call>x',
      content="x", calls=(NOW_CALL,)),
    T("a bracket inside is missing", '<tool_call>{"name": "weather", "arguments": {"place": {"a": 1}\n</tool_call>',
      calls=(("weather", '{"place": {"a": 1}\n'),)),
    T("text where the last bracket should be", '<tool_call>{"name": "now", "arguments": {} \n x', content="x", calls=(NOW_CALL,)),
    T("cut off in the arguments", '<tool_call>{"name": "weather", "arguments": {"city": "Par',
      calls=(("weather", '{"city": "Par'),)),
    T("cut off in an escape", '<tool_call>{"name": "weather", "arguments": {"city": "\\',
      calls=(("weather", '{"city": "\\'),)),
]  # fmt: skip

BROKEN_CALLS = [
    T("only the tag", "<tool_call>", content="<tool_call>"),
    T("an empty call", "a <tool_call>\n</tool_call> b", content="a <tool_call>\n</tool_call> b"),
    T("prose in the tag", "<tool_call> is a tag", content="<tool_call> is a tag"),
    T("an unknown function", 'a\n<tool_call>{"name": "rm", "arguments": {"x": 1}}</tool_call>\n',
      content='a\n<tool_call>{"name": "rm", "arguments": {"x": 1}}</tool_call>\n'),
    T("an unknown function of Qwen's",
      "<tool_call>\n<function=rm>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
      content="<tool_call>\n<function=rm>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"),
    T("no name", '<tool_call>{"arguments": {}}</tool_call>', content='<tool_call>{"arguments": {}}</tool_call>'),
    T("a name that is none", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
      content='<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    T("no JSON", "<tool_call>{name: now}</tool_call>", content="<tool_call>{name: now}</tool_call>"),
    T("cut off in the name", '<tool_call>{"name": "wea', content='<tool_call>{"name": "wea'),
    T("cut off before the arguments", '<tool_call>{"name": "weather", "arguments":',
      content='<tool_call>{"name": "weather", "arguments":'),
    T("an array of calls", '<tool_call>[{"name": "now"}]</tool_call>', content='<tool_call>[{"name": "now"}]</tool_call>'),
    T("a broken call and a good one", f"<tool_call>{{]</tool_call>\n{NOW}",
      content="<tool_call>{]</tool_call>", calls=(NOW_CALL,)),
    T("a tag, then the call", f"<tool_call>{NOW}", content="<tool_call>", calls=(NOW_CALL,)),
    T("more whitespace than a call has", f"<tool_call>{' ' * 70}{{}}", content=f"<tool_call>{' ' * 70}{{}}"),
    T("Qwen's head without an end", "<tool_call>\n<function=weather\n", content="<tool_call>\n<function=weather\n"),
    T("a function without the tag, in Hermes", "<function=now>\n</function>",
      content="<function=now>\n</function>", form=HERMES),
]  # fmt: skip

QWEN_CALLS = [
    T("a call", PARIS_XML, calls=(PARIS_CALL,)),
    T("text before it", f"I look.\n\n{PARIS_XML}", content="I look.", calls=(PARIS_CALL,)),
    T("two calls", f"{PARIS_XML}\n{PARIS_XML}\n", calls=(PARIS_CALL, PARIS_CALL)),
    T("both formats", f"{PARIS_XML}\n{NOW}", calls=(PARIS_CALL, NOW_CALL)),
    T("no parameters", "<tool_call>\n<function=now>\n</function>\n</tool_call>", calls=(NOW_CALL,)),
    T("no line breaks", "<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>",
      calls=(PARIS_CALL,)),
    T("two functions in one tag", "<tool_call><function=now></function>\n<function=now></function></tool_call>",
      calls=(NOW_CALL, NOW_CALL)),
    T("without the outer tag", "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
      calls=(PARIS_CALL,)),
    T("an integer", xml("days", "5"), calls=(("weather", '{"days": 5}'),)),
    T("a number", xml("share", "-0.5"), calls=(("weather", '{"share": -0.5}'),)),
    T("an integer that is none", xml("days", "five"), calls=(("weather", '{"days": "five"}'),)),
    T("an integer with a fraction is left to the checker", xml("days", "5.5"), calls=(("weather", '{"days": 5.5}'),)),
    T("a boolean", xml("metric", "true"), calls=(("weather", '{"metric": true}'),)),
    T("a boolean as templates write it", xml("metric", "False"), calls=(("weather", '{"metric": false}'),)),
    T("an object", xml("place", '{"a": [1, 2]}'), calls=(("weather", '{"place": {"a": [1, 2]}}'),)),
    T("an object over several lines", xml("place", '{\n  "a": "x\ny"\n}'),
      calls=(("weather", '{"place": {"a": "x\\ny"}}'),)),
    T("an array", xml("hours", '[6, "noon"]'), calls=(("weather", '{"hours": [6, "noon"]}'),)),
    T("an array that is none", xml("hours", "[6, noon"), calls=(("weather", '{"hours": "[6, noon"}'),)),
    T("a string that looks like a number", xml("city", "12345"), calls=(("weather", '{"city": "12345"}'),)),
    T("a string that looks like an object", xml("city", '{"a": 1}'), calls=(("weather", '{"city": "{\\"a\\": 1}"}'),)),
    T("a nullable string", xml("note", "null"), calls=(("weather", '{"note": null}'),)),
    T("a nullable string with text", xml("note", "17"), calls=(("weather", '{"note": "17"}'),)),
    T("a string or an integer", xml("id", "17"), calls=(("weather", '{"id": 17}'),)),
    T("a string or an integer, and text", xml("id", "17b"), calls=(("weather", '{"id": "17b"}'),)),
    T("None as templates write it", xml("until", "None"), calls=(("weather", '{"until": null}'),)),
    T("an enum of strings", xml("unit", "C"), calls=(("weather", '{"unit": "C"}'),)),
    T("a referenced schema", xml("where", '{"x": 1}'), calls=(("weather", '{"where": {"x": 1}}'),)),
    T("no type: JSON where it is some", xml("free", '{"x": 1}'), calls=(("weather", '{"free": {"x": 1}}'),)),
    T("no type: else text", xml("free", "some words"), calls=(("weather", '{"free": "some words"}'),)),
    T("a parameter that the schema lacks", xml("other", "5"), calls=(("weather", '{"other": 5}'),)),
    T("infinity is no JSON", xml("share", "Infinity"), calls=(("weather", '{"share": "Infinity"}'),)),
    T("an empty value", xml("city", ""), calls=(("weather", '{"city": ""}'),)),
    T("line breaks of the value itself", xml("city", "\na\n\n"), calls=(("weather", '{"city": "\\na\\n\\n"}'),)),
    T("spaces of the value itself", xml("city", "  a  "), calls=(("weather", '{"city": "  a  "}'),)),
    T("scripts", xml("city", "東京 🦜"), calls=(("weather", '{"city": "東京 🦜"}'),)),
    T("quotes and backslashes", xml("city", 'a "b" \\n'), calls=(("weather", '{"city": "a \\"b\\" \\\\n"}'),)),
    T("markup in a value", xml("city", "<b>1 < 2</b> </para </parameter> x </function> <x"),
      calls=(("weather", '{"city": "<b>1 < 2</b> </para </parameter> x </function> <x"}'),)),
    T("several parameters",
      "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
      "<parameter=text>\nif a:\n    b()\n\n</parameter>\n</function>\n</tool_call>",
      calls=(("write_file", '{"path": "a.py", "text": "if a:\\n    b()\\n"}'),)),
    T("a value without its end tag", "<tool_call><function=weather><parameter=city>Paris</function></tool_call>x",
      content="x", calls=(PARIS_CALL,)),
    T("a function without its end tag", "<tool_call><function=weather><parameter=city>Paris</parameter></tool_call>x",
      content="x", calls=(PARIS_CALL,)),
    T("without the outer end tag", PARIS_XML.removesuffix("</tool_call>"), calls=(PARIS_CALL,)),
    T("prose between parameters ends the call", "<tool_call><function=now> and so on</function>",
      content="and so on</function>", calls=(NOW_CALL,)),
    T("cut off in a string", "<tool_call><function=weather><parameter=city>\nPar", calls=(("weather", '{"city": "Par'),)),
    T("cut off in a number", "<tool_call><function=weather><parameter=days>\n1", calls=(("weather", '{"days": 1'),)),
    T("cut off behind a value", "<tool_call><function=weather><parameter=city>\nParis\n</parameter>\n",
      calls=(("weather", '{"city": "Paris"'),)),
    T("cut off behind the name", "<tool_call><function=weather>\n<para", calls=(("weather", ""),)),
]  # fmt: skip

TRANSCRIPTS = {
    f"{group}: {transcript.name}": transcript
    for group, transcripts in (
        ("content", CONTENT),
        ("reasoning", REASONING),
        ("Hermes", HERMES_CALLS),
        ("broken", BROKEN_CALLS),
        ("Qwen", QWEN_CALLS),
    )
    for transcript in transcripts
}
