"""econmt beside other toolkits: the same data, the same model, the same updates, in turns."""
