"""Options of commands: how they are declared, and those that several commands share."""
