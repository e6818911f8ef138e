"""Request bodies as pydantic models: the one place where a validation error becomes an answer that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engines.errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)


def validated(model: type[Body], body: Mapping[str, Any]) -> Body:
    """`body` as a `model`. Raises InvalidRequest with the path of the field that is wrong as `param`."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _problem(error) from error
    except RecursionError as error:
        raise InvalidRequest("The request body is nested too deeply.") from error


def clean_text(text: str) -> str:
    """`text` itself. Raises ValueError for lone surrogates, which pass JSON's escapes but are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds a lone surrogate, which is not valid Unicode") from error
    return text


def plain_json(value: Any) -> str:
    """`value` as JSON text. Raises ValueError where it is not plain JSON: infinities, lone surrogates, endless nesting."""
    try:
        return clean_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _problem(error: ValidationError) -> InvalidRequest:
    # Of a union's failed branches the one that got deepest into the value is the one the client meant.
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = max(problems, key=lambda p: (p["loc"][:1] == problems[0]["loc"][:1], len(p["loc"])))
    param = ".".join(str(step) for step in problem["loc"] if not _is_union_branch(step)) or None
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def _is_union_branch(step: int | str) -> bool:
    """Pydantic names the branch of a union that it tried in `loc`; clients know only field names and indices."""
    return isinstance(step, str) and (step in ("str", "int", "float", "bool") or "[" in step or step[:1].isupper())
