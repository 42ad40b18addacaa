"""Chat templates and tokenisation with a transformers tokenizer."""
