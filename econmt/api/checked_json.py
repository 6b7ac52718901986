"""JSON that programs get from others, read strictly, and JSON text that is safe to print on a terminal."""

from __future__ import annotations

from econmt.config.json_reader import Record as Record
from econmt.config.json_reader import json_text as json_text
from econmt.config.json_reader import parse_json as parse_json
from econmt.config.json_reader import read_json as read_json
from econmt.config.yaml_reader import complaints as complaints
from econmt.config.yaml_reader import shortened as shortened
