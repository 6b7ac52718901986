"""Sentences that clients send with wishes for their translation, and translations as JSON."""

from __future__ import annotations

import torch

from econmt.data.text.glossary import Glossary as Glossary
from econmt.data.text.glossary import occurrences as occurrences
from econmt.data.text.glossary import parse_glossary as parse_glossary
from econmt.data.text.vocabulary import normalized as normalized
from econmt.decoding.formats import fields_of as fields_of
from econmt.decoding.requests import Request as Request
from econmt.decoding.requests import check_request as check_request
from econmt.decoding.requests import request_of as request_of
from econmt.decoding.search.beam import output_limits
from econmt.decoding.translator import Translator


def constraint_tokens(translator: Translator, request: Request, where: str = "request") -> tuple[int, int]:
    """Counts the tokens of a request's constraints, terms of glossaries and ``target_prefix`` included.

    Args:
        translator: the translator that the request is for. request: sentence with its constraints.
        where: name of the request in messages.

    Returns:
        Their number, and the largest number of tokens that a translation of the sentence can have.

    Raises:
        InputError: if the constraints cannot be satisfied.
    """
    constraints = translator.constraint_compiler.of(request, where)
    # A search takes as many steps as tokens are written: at most those of the longest sentence in training.
    longest = translator.max_length
    tokens = max(longest or 0, len(translator.vocabularies.source.encode(request.text)))
    most = output_limits(torch.tensor([tokens + 1]), translator.options.max_output_factor, longest)
    return len(constraints.ids), int(most)
