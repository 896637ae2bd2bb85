"""From a request's ``response_format`` or ``structured_outputs`` to what the engine enforces."""

from typing import Final

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import StructuredKind, StructuredOutput
from octavo.server.protocol.common import GenerationRequest
from octavo.server.protocol.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
)

_FORMAT: Final = "response_format"
_OUTPUTS: Final = "structured_outputs"


def structured_output(request: GenerationRequest) -> StructuredOutput | None:
    """Return the shape that the request asks for, None for free text.

    Raises:
        InvalidRequestError: it asks for more than one.
    """
    asked = [
        *_of_format(request.response_format),
        *([] if request.structured_outputs is None else _of_outputs(request.structured_outputs)),
    ]
    if len(asked) > 1:
        raise InvalidRequestError(
            "Only one shape of output can be asked for, in response_format or structured_outputs.",
            param=_OUTPUTS,
        )
    return asked[0] if asked else None


def _of_format(form: ResponseFormat | None) -> list[StructuredOutput]:
    match form:
        case JsonObjectFormat():
            return [StructuredOutput.json_object(param=_FORMAT)]
        case JsonSchemaFormat():
            return [StructuredOutput.json_schema(form.json_schema.schema_, param=_FORMAT)]
        case StructuralTagFormat():
            tags = form.model_dump(by_alias=True, include={"structures", "triggers"})
            return [StructuredOutput.structural_tag(tags, param=_FORMAT)]
        case _:
            return []


def _of_outputs(outputs: StructuredOutputs) -> list[StructuredOutput]:
    asked = []
    if outputs.json_ is not None:
        asked.append(StructuredOutput.json_schema(outputs.json_))
    if outputs.json_object:
        asked.append(StructuredOutput.json_object())
    if outputs.regex is not None:
        asked.append(StructuredOutput.regex(outputs.regex))
    if outputs.choice is not None:
        asked.append(StructuredOutput.choice(outputs.choice))
    if outputs.grammar is not None:
        asked.append(StructuredOutput.grammar(outputs.grammar))
    if isinstance(outputs.structural_tag, str):
        asked.append(StructuredOutput(StructuredKind.STRUCTURAL_TAG, outputs.structural_tag))
    elif outputs.structural_tag is not None:
        asked.append(StructuredOutput.structural_tag(outputs.structural_tag))
    if not asked:
        raise InvalidRequestError(
            "structured_outputs must have one of json, json_object, regex, choice, grammar and "
            "structural_tag.",
            param=_OUTPUTS,
        )
    return asked
