"""Translates the checkpoints of an OpenRLHF command: directories, intervals and resuming."""

from rollgrad.entrypoints.openrlhf.draft import Draft


def translate_checkpoints(draft: Draft) -> None:
    """Sets `ckpt`. OpenRLHF's `save_steps` saves training states (to `ckpt_path`), and models as well with
    `save_hf_ckpt`; `load_checkpoint` continues from the newest state if there is one.

    Raises:
        ConfigurationError: a value is not of its flag's kind.
    """
    draft.set("ckpt.output_dir", draft.value("ckpt.output_dir", "./ckpt"))
    steps = draft.value("ckpt.save_steps", -1)
    if draft.value("ckpt.disable_ds", False):
        draft.set("ckpt.state_minutes", None)
        for flag in ("ckpt.path", "ckpt.max_num"):
            draft.lose(flag, "no training state is saved with --disable_ds_ckpt, in OpenRLHF neither")
    else:
        draft.set("ckpt.state_steps", steps)
        draft.set("ckpt.state_dir", draft.value("ckpt.path"))
        if "ckpt.max_num" in draft.options:
            draft.set("ckpt.keep_states", draft.value("ckpt.max_num"))
    if draft.value("ckpt.save_hf", False):
        draft.set("ckpt.save_steps", steps)
        draft.change("ckpt.save_hf", "models are saved in the run's directory (ckpt.output_dir), as step_N")
    if draft.value("ckpt.load_enable", False):
        draft.set("ckpt.resume", "auto")
    draft.lose("ckpt.max_mem", "training states are kept by their number, ckpt.keep_states")
    if draft.value("critic.save_value_network", False):
        draft.change("critic.save_value_network", "the critic is saved below the model, in the directory critic")
