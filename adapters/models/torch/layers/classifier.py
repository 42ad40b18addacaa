"""Classes of sequence classifiers, as transformers has them: a model's body under its own name, and a head `score`.

transformers lists such a class for most language models, but for few that see images (Gemma 3, Qwen3.5). For the others
one is made as transformers makes its own, so that files have the same names in all. Does not own: weights.
"""

from typing import Any


def is_vision_language(config: Any) -> bool:
    """Returns whether the model of these settings sees images."""
    import transformers

    return type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def sequence_classifier(config: Any, dtype: Any) -> Any:
    """Returns a sequence classifier with these settings, whose weights are random and have the format `dtype`.

    Raises:
        ValueError: transformers has none, and the model sees no images.
    """
    import transformers

    kind = classifier_class(config)
    if kind is transformers.AutoModelForSequenceClassification:
        return kind.from_config(config, dtype=dtype)
    return kind._from_config(config, dtype=dtype)


def classifier_class(config: Any) -> Any:
    """Returns the class that loads a sequence classifier with these settings."""
    import transformers
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or not is_vision_language(config):
        return transformers.AutoModelForSequenceClassification
    body = transformers.MODEL_MAPPING[type(config)]
    name = f"{body.__name__.removesuffix('Model')}ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, body.__base__), {"__module__": __name__})
