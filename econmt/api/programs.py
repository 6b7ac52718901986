"""Programs of the user, which read lines and write lines; they end with the process that starts them.

Example::

    with start_program(program_words("--command", "apertium eng-spa"), ["A dog."]) as program:
        print(list(program.output()), program.code)
"""

from __future__ import annotations

from econmt.data.user_programs import ProgramError as ProgramError
from econmt.data.user_programs import UserProgram as UserProgram
from econmt.data.user_programs import program_words as program_words
from econmt.data.user_programs import start_program as start_program
