"""The checks before a run, which find mistakes before a model is loaded.

plan.py      loads and checks the rows, tools and rewards
prompts.py   checks that the chat template and the context of the model fit the rows
capacity.py  checks that the machine lets the run open as many files as it needs
servers.py   asks the servers that run already whether they answer
teacher.py   checks that the teacher fits the rows and the policy's tokenizer
describe.py  describes the run
"""

from agentrl.preflight.capacity import check_open_files
from agentrl.preflight.describe import describe_history, describe_run, render_first_prompts
from agentrl.preflight.plan import (
    Plan,
    announce_files,
    check_policy_learns,
    find_code,
    load_files,
    make_plan,
)
from agentrl.preflight.prompts import (
    CANARY_TOKENS,
    CANARY_TOKENS_OF_FLOAT32,
    SHIPPED_LOOPS,
    check_model_fits,
    check_prompts,
    check_rows_fit,
    check_template_fits,
    check_tool_format,
    encode_prompts,
    longest_prompt,
    longest_response,
    make_canary_row,
    verify_rows,
)
from agentrl.preflight.servers import ask_servers, configured_servers
from agentrl.preflight.teacher import check_tokenizers

__all__ = [
    "CANARY_TOKENS", "CANARY_TOKENS_OF_FLOAT32", "SHIPPED_LOOPS", "Plan", "announce_files",
    "ask_servers", "check_model_fits", "check_open_files", "check_policy_learns", "check_prompts",
    "check_rows_fit", "check_template_fits", "check_tokenizers", "check_tool_format",
    "configured_servers", "describe_history", "describe_run", "encode_prompts", "find_code",
    "load_files", "longest_prompt", "longest_response", "make_canary_row",
    "make_plan", "render_first_prompts", "verify_rows",
]  # fmt: skip
