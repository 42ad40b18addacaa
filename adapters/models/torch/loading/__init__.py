"""Models as they are loaded, checked, quantised, given LoRA, merged and saved."""
