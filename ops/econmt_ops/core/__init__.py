"""Types and rules that all ops share: weights, shapes, lengths, precision, blocks of steps, arguments of operators."""
