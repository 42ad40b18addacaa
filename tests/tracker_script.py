"""Reports a run and its continuation to the trackers named on the command line, into the directory named first, and
prints as JSON what each of them has kept; after --read, what those named there have. It runs with the packages of
tests/trackers.txt on its path."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.application.settings.sections.examples import ExampleDataConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sft import SFTRun
from rollgrad.entrypoints.composition.outputs import make_sinks

Kept = dict[str, Any]
SAMPLE = {"prompt": "What is 1 + 1?", "response": "It is 2.", "label": "2", "stop_reason": "stop"}


def kept_by_wandb(directory: Path) -> Kept:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    kept: Kept = {"points": [], "ids": [], "samples": [], "failed": []}
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(path)
            while (data := reader.scan()) is not None:
                record = Record()
                record.ParseFromString(data)
                if record.WhichOneof("record_type") == "run":
                    run, items = record.run, record.run.config.update
                    kept["ids"].append(run.run_id)
                    kept |= {"project": run.project, "name": run.display_name, "group": run.run_group}
                    kept |= {"settings": {item.key: json.loads(item.value_json) for item in items}}
                if record.WhichOneof("record_type") == "history":
                    row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                    if "samples/path" in row:
                        table = json.loads((path.parent / "files" / row["samples/path"]).read_text())
                        kept["samples"] += [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]
                    else:
                        kept["points"].append([row["step"], row["reward/mean"]])
                if record.WhichOneof("record_type") == "exit":
                    kept["failed"].append(record.exit.exit_code == 1)
                if record.WhichOneof("record_type") == "summary":
                    if "failure" in [item.key for item in record.summary.remove]:
                        kept["reason"] = None
                    told = {item.key: item.value_json for item in record.summary.update}
                    kept |= {"reason": json.loads(told["failure"])} if "failure" in told else {}
    return kept


def kept_by_trackio(directory: Path) -> Kept:
    from trackio import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("sums")
    logs = SQLiteStorage.get_logs("sums", name)
    points = [[row["step"], row["reward/mean"]] for row in logs if "reward/mean" in row]
    samples = [
        {
            **trace["metadata"],
            **dict(zip(("prompt", "response"), [m["content"] for m in trace["messages"]], strict=True)),
        }
        for trace in SQLiteStorage.get_traces("sums", name)
    ]
    alerts = SQLiteStorage.get_alerts("sums")
    config = SQLiteStorage.get_run_config("sums", name)
    assert config is not None
    return {
        "points": points,
        "samples": samples,
        "failed": [alert["level"] == "error" for alert in alerts],
        "reason": alerts[-1]["text"],
        "project": "sums",
        "name": name.rpartition("-")[0],
        "group": config["_Group"],
        "settings": config,
    }


def kept_by_mlflow(directory: Path) -> Kept:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    points = [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, "reward/mean")]
    params = run.data.params
    files = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    samples = [
        sample
        for file in files
        for sample in json.loads(Path(client.download_artifacts(run.info.run_id, file)).read_text())["samples"]
    ]
    return {
        "points": points,
        "evaluations": sorted(name for name in run.data.metrics if name.startswith("eval/")),
        "samples": samples,
        "failed": [run.info.status == "FAILED"],
        "reason": run.data.tags.get("failure"),
        "project": experiment.name,
        "name": run.info.run_name,
        "group": run.data.tags["group"],
        "settings": {"train": {"seed": int(params["train.seed"])}, "data": {"dataset": params["data.dataset"]}},
    }


def kept_by_swanlab(directory: Path) -> Kept:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    kept: Kept = {"points": [], "ids": [], "printed": [], "samples": [], "failed": []}
    for path in sorted(directory.glob("swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "start":
                run = record.start
                kept["ids"].append(run.id)
                kept |= {"project": run.project, "name": run.name, "group": run.group}
            if kind == "scalar" and record.scalar.key == "reward/mean":
                kept["points"].append([record.scalar.step, record.scalar.value.number])
            if kind == "media":
                for item in record.media.value.items:
                    (file,) = path.parent.rglob(item.filename)
                    prompt, response = file.read_text().split("\n\n")
                    kept["samples"].append({"step": record.media.step, "prompt": prompt, "response": response})
            if kind == "finish":
                kept["failed"].append(record.finish.state == RunState.RUN_STATE_CRASHED)
                kept["reason"] = record.finish.error
            if kind == "log":
                kept["printed"].append(record.log.line)
        config = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
        kept["settings"] = {name: entry["value"] for name, entry in config.items()}
    return kept


READERS = {
    "wandb": kept_by_wandb,
    "trackio": kept_by_trackio,
    "mlflow": kept_by_mlflow,
    "swanlab": kept_by_swanlab,
}


def main(directory: Path, trackers: Sequence[str], read: Sequence[str]) -> None:
    logger = LoggerConfig(console=False, report_to=tuple(trackers), project="sums", run_name="first", group="all")
    data = ExampleDataConfig(dataset="https://user:a-password@host/rows.jsonl")
    config = SFTRun(logger=logger, data=data, ckpt=CheckpointConfig(output_dir=str(directory)))
    for steps in ((1, 2), (2, 3)):  # a run that was interrupted takes its last step again
        sinks = make_sinks(config, 3, {})
        for step in steps:
            sinks.log(step, {"reward/mean": step / 4, "eval/of é/pass@4": 0.5})  # in names some trackers refuse much
            sinks.samples(step, [SAMPLE | {"step": step, "reward": step / 4}])
            print("a line that concerns no tracker")
        if steps[-1] == 3:
            sinks.fail("OutOfMemory: at https://user:a-password@host/rows.jsonl")
        sinks.close()
    kept = {name: READERS[name](directory) for name in read}
    marking = [name for name in ("wandb", "mlflow") if name in read]  # a run as failed until it is continued
    if marking:
        config.logger.report_to = tuple(marking)
        sinks = make_sinks(config, 3, {})
        sinks.log(3, {"reward/mean": 0.75})
        sinks.close()
        for name in marking:
            continued = READERS[name](directory)
            kept[name]["when_continued"] = [continued["failed"][-1], continued["reason"]]
    print(json.dumps(kept))


if __name__ == "__main__":
    words = sys.argv[2 : sys.argv.index("--secret")]  # after which the command line holds what no tracker may have
    named, _, asked = " ".join(words).partition("--read")
    main(Path(sys.argv[1]), named.split(), (asked or named).split())
