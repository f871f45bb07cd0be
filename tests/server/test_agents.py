"""Agents and other clients from pip, over llama-server and over MTPLlama: depth changes nothing.

The demo model has never seen a tool: as in test_tool_calls.py, the token that begins a call is
lifted. Its form of a call leaves strings free, so these tools take none. Each round offers those
that are left, so that an agent calls one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.commands import run_python
from support.real_server import Server, post
from support.tools import TEMPLATE

pytestmark = [pytest.mark.server, pytest.mark.ecosystem]

DEPTHS = (0, 3)
TOOLS = """
import json, sys

def open_path(hidden: bool, write: bool) -> str:
    "Open the path."
    return f"hidden={hidden} write={write}"

def set_flag(on: bool) -> str:
    "Set the flag."
    return "on" if on else "off"

where, token, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
"""

# The messages of three rounds: a call of each tool, and the answer.
LANGCHAIN = """
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.tools import tool

if where.startswith("http"):
    from langchain_openai import ChatOpenAI
    model = ChatOpenAI(base_url=where + "/v1", api_key="none", model="default", temperature=0,
                       max_tokens=400, max_retries=0)
else:
    from mtp_gguf.native import MTPLlama
    import llama_cpp

    class Drafting(MTPLlama):
        def __init__(self, *given, **options):
            super().__init__(*given, depth=depth, **options)

    llama_cpp.Llama = Drafting
    from langchain_community.chat_models import ChatLlamaCpp
    model = ChatLlamaCpp(model_path=where, n_ctx=2048, n_threads=1, temperature=0, max_tokens=400,
                         verbose=False, model_kwargs={"n_threads_batch": 1})

@wrap_model_call
def one_tool_in_each_round(request, handler):
    done = sum(message.type == "tool" for message in request.messages)
    tools = request.tools[done : done + 1]
    settings = {"logit_bias": {token: 100 if tools else -100}}
    settings |= {"parallel_tool_calls": False} if tools else {}
    choice = {"type": "function", "function": {"name": tools[0].name}} if tools else None
    return handler(request.override(tools=tools, tool_choice=choice, model_settings=settings))

agent = create_agent(model, [tool(open_path), tool(set_flag)], system_prompt="Be brief.",
                     middleware=[one_tool_in_each_round])
found = agent.invoke({"messages": [("user", "Open the path.")]})["messages"]
print(json.dumps([[m.type, m.text, [[c["name"], c["args"]] for c in getattr(m, "tool_calls", [])]]
                  for m in found]))
"""

PYDANTIC_AI = """
from pydantic import BaseModel
from pydantic_ai import Agent, Tool
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

class Ticket(BaseModel):
    crash: bool
    urgent: bool

def after(*names):
    "Offer a tool once those with these names, and no others, have been called."
    async def prepare(context, tool):
        done = [part.tool_name for message in context.messages for part in message.parts
                if part.part_kind == "tool-return"]
        return tool if done == [*names] else None
    return prepare

async def at_the_end(context, tools):
    return tools if sum(part.part_kind == "tool-return" for message in context.messages
                        for part in message.parts) == 2 else []

provider = OpenAIProvider(base_url=where + "/v1", api_key="none")
agent = Agent(OpenAIChatModel("default", provider=provider), output_type=[Ticket],
              tools=[Tool(open_path, prepare=after()),
                     Tool(set_flag, prepare=after("open_path"))],
              instructions="Be brief.", capabilities=[PrepareOutputTools(at_the_end)])
settings = {"temperature": 0, "max_tokens": 400, "logit_bias": {str(token): 100},
            "parallel_tool_calls": False}
found = agent.run_sync("Open the path.", model_settings=settings)
print(json.dumps([[part.part_kind, getattr(part, "tool_name", ""),
                   part.args_as_dict() if part.part_kind == "tool-call" else str(part.content)]
                  for message in found.all_messages() for part in message.parts
                  if part.part_kind in ("user-prompt", "tool-call", "tool-return")]))
assert isinstance(found.output, Ticket)
"""

ANTHROPIC = """
from anthropic import Anthropic, BadRequestError

def declared(name, **fields):
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    return {"name": name, "description": "A tool.", "input_schema": schema}

yes_or_no = {"type": "boolean"}
tools = [declared("open_path", hidden=yes_or_no, write=yes_or_no),
         declared("set_flag", on=yes_or_no)]
client = Anthropic(base_url=where, api_key="none", max_retries=0)
asked = {"model": "default", "system": "Be brief.", "tools": tools}
options = {"max_tokens": 400, "extra_body": {"temperature": 0}}
messages = [{"role": "user", "content": "Open the path."}]
counts = []
for function in (open_path, set_flag):
    counts.append(client.messages.count_tokens(messages=messages, **asked).input_tokens)
    choice = {"type": "tool", "name": function.__name__, "disable_parallel_tool_use": True}
    answer = client.messages.create(messages=messages, tool_choice=choice, **asked, **options)
    assert answer.stop_reason == "tool_use", answer
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == function.__name__
    result = {"type": "tool_result", "tool_use_id": call.id, "content": function(**call.input)}
    said = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
    messages += [{"role": "assistant", "content": [said]}, {"role": "user", "content": [result]}]
    print(json.dumps([call.name, call.input, result["content"]]))
assert counts == sorted(set(counts))
print(json.dumps(counts))
try:
    wrong = {"type": "tool", "name": "missing"}
    client.messages.create(messages=messages[:1], tool_choice=wrong, **asked, **options)
    raise SystemExit("not refused")
except BadRequestError:
    pass
"""

LLAMA_INDEX = """
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model="default", api_base=where + "/v1", api_key="none", is_chat_model=True,
                 is_function_calling_model=True, context_window=2048, max_tokens=400, temperature=0,
                 max_retries=0)
messages = [ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="user", content="Open the path.")]
for function in (open_path, set_flag):
    tool = FunctionTool.from_defaults(function)
    answer = llm.chat_with_tools([tool], chat_history=messages, tool_required=True,
                                 logit_bias={str(token): 100})
    (call,) = llm.get_tool_calls_from_response(answer)
    content = tool.call(**call.tool_kwargs).content
    messages += [answer.message, ChatMessage(role="tool", content=content,
                                             additional_kwargs={"tool_call_id": call.tool_id})]
    print(json.dumps([call.tool_name, call.tool_kwargs, content]))
print(json.dumps(llm.chat(messages, logit_bias={str(token): -100}).message.content))
"""

INSTRUCTOR = """
import instructor
from pydantic import BaseModel

class Ticket(BaseModel):
    crash: bool
    urgent: bool

asked = {"response_model": Ticket, "messages": [{"role": "user", "content": "It crashes."}],
         "max_tokens": 400, "temperature": 0, "logit_bias": {token: 100},
         "parallel_tool_calls": False, "max_retries": 1}
if where.startswith("http"):
    from openai import OpenAI
    client = OpenAI(base_url=where + "/v1", api_key="none", max_retries=0)
    create = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create
    asked["model"] = "default"
else:
    from mtp_gguf.native import MTPLlama
    llm = MTPLlama(where, n_ctx=2048, n_threads=1, n_threads_batch=1, depth=depth)
    create = instructor.patch(create=llm.create_chat_completion_openai_v1,
                              mode=instructor.Mode.TOOLS)
print(create(**asked).model_dump_json())
"""

# Each with the packages that it needs, and whether it speaks to a Python object, too.
PROGRAMS = {
    "langchain": (LANGCHAIN, ("langchain", "langchain_openai", "langchain_community"), True),
    "pydantic-ai": (PYDANTIC_AI, ("pydantic_ai",), False),
    "anthropic": (ANTHROPIC, ("anthropic",), False),
    "llama-index": (LLAMA_INDEX, ("llama_index",), False),
    "instructor": (INSTRUCTOR, ("instructor",), True),
}


@pytest.fixture(scope="module")
def model(templated: Callable[[str], Path]) -> Path:
    return templated(TEMPLATE.read_text())


@pytest.fixture(scope="module")
def places(server: Server, model: Path) -> Iterator[tuple[int, dict[int, int]]]:
    """The token that begins a call, and the port of a server for each depth."""
    with server.running(model, options=["--no-draft"]) as client:
        _, found = post(client.port, "/tokenize", {"content": "<tool_call>"})
        (token,) = found["tokens"]
    lifted = ("--logit-bias", f"{token}+100")
    with (
        server.running(model, *lifted, options=["--no-draft"]) as plain,
        server.running(model, *lifted, options=["--depth", 3]) as drafting,
    ):
        yield token, {0: plain.port, 3: drafting.port}


@pytest.mark.parametrize("name", PROGRAMS)
def test_depth_changes_nothing(name: str, model: Path, places: Any, tmp_path: Path) -> None:
    code, packages, in_process = PROGRAMS[name]
    if missing := [package for package in packages if find_spec(package) is None]:
        pytest.skip(f"{missing} are not installed; pip install '.[test,ecosystem]'")
    token, ports = places
    ways = [(f"http://127.0.0.1:{ports[depth]}", depth) for depth in DEPTHS]
    ways += [(str(model), depth) for depth in DEPTHS if in_process]
    said = [run_python(TOOLS + code, *way[:1], token, way[1], cwd=tmp_path) for way in ways]
    found = [[json.loads(line) for line in text.splitlines()] for text in said]
    assert found[0]
    assert found == [found[0]] * len(found)
