"""Tasks: model, batches and loss of translation and of language modelling, behind one interface."""
