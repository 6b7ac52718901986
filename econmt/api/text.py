"""Parts of texts that are not translated, and translations of the rest.

These names are loaded without torch, for processes that divide texts and start fast.
"""

from __future__ import annotations

from econmt.data.text.words import BLANKS as BLANKS
from econmt.data.text.words import addresses as addresses
from econmt.data.text.words import has_words as has_words
from econmt.decoding.translation import EMPTY as EMPTY
from econmt.decoding.translation import Divide as Divide
from econmt.decoding.translation import NBestEntry as NBestEntry
from econmt.decoding.translation import Translation as Translation
