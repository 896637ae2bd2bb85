"""Answers of ``POST /v1/embeddings``."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.engine.outputs import scaled
from octavo.server.job import Job
from octavo.server.ports import Tokenizer
from octavo.server.protocol.embeddings import EmbeddingRequest
from octavo.server.responses import Collected, Envelope


def embeddings_body(
    job: Job[EmbeddingRequest], envelope: Envelope, tokenizer: Tokenizer, answer: Collected
) -> dict[str, Any]:
    """Return the body of an answer: one vector per input."""
    usage = answer.usage()
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(answer.embeddings[index], job.request),
        }
        for index in range(len(job.prompts))
    ]
    return {
        "object": "list",
        "data": data,
        "model": envelope.model,
        "usage": {
            name: usage[name] for name in ("prompt_tokens", "total_tokens", "prompt_tokens_details")
        },
    }


def _encoded(values: Sequence[float], request: EmbeddingRequest) -> str | list[float]:
    single = np.asarray(scaled(values) if request.normalize else values).astype("<f4")
    if request.encoding_format == "base64":
        return base64.b64encode(single.tobytes()).decode()
    numbers: list[float] = single.tolist()
    return numbers
