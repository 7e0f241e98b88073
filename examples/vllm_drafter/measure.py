"""CPU seconds of vllm serve per 100 tokens, several settings one after another: python measure2.py OUT TARGET DRAFT LENGTH PROMPTS name ..."""
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
sys.path[:0] = ["tests"]
from support.runs import vllm_server
vllm_server.START = 900.0
vllm_server.OPTIONS = vllm_server.OPTIONS.replace("float32", "bfloat16")
from support.runs.vllm_server import served
from transformers import AutoTokenizer
out, target, draft, length, count, *names = sys.argv[1:]
length = int(length)
PROMPTS = [json.loads(line)["prompt"] for line in Path("prompts.jsonl").read_text().splitlines()][: int(count)]
tokenizer = AutoTokenizer.from_pretrained(target)
prompts = tokenizer.apply_chat_template([[{"role": "user", "content": each}] for each in PROMPTS], add_generation_prompt=True, return_dict=False)
def command(name):
    if name == "plain": return f"vllm serve {target}"
    if name.startswith("k"): settings = {"method": "draft_model", "model": draft, "num_speculative_tokens": int(name[1:])}
    else:
        most = 8 if name == "rule" else int(name[5:])
        settings = {"method": "custom_class", "model": "drafter.Drafter", "num_speculative_tokens": most}
    return f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"
def cpu():
    total = 0
    for p in Path("/proc").iterdir():
        if p.name.isdigit():
            try:
                env = (p / "environ").read_bytes()
                if b"MEASURED=1" in env: total += sum(map(int, (p / "stat").read_text().rsplit(") ", 1)[1].split()[11:13]))
            except OSError: pass
    return total / os.sysconf("SC_CLK_TCK")
os.environ.update(SPECDECPP_DRAFT=draft, PYTHONPATH="examples/vllm_drafter:" + os.environ.get("PYTHONPATH", ""), MEASURED="1")
found = json.loads(Path(out).read_text()) if Path(out).exists() else {}
for name in names:
    os.environ["SPECDECPP_FIXED"] = name[5:] if name.startswith("fixed") else "0"
    log = Path(f"/tmp/log_{name}.txt"); begin = time.perf_counter()
    try:
        with served(command(name), log) as server:
            ready = time.perf_counter() - begin
            result = {}
            server.greedy(prompts[0], 8)
            for clients in (2, 8, 2, 8):
                c0, t0 = cpu(), time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    answers = list(pool.map(lambda p: server.greedy(p, length)[1], prompts))
                n = sum(map(len, answers))
                result.setdefault(str(clients), []).append([round(100 * (cpu() - c0) / n, 2), round(100 * (time.perf_counter() - t0) / n, 2)])
                result[f"answers{clients}"] = answers
            result["counts"] = server.counts(); result["ready"] = round(ready)
    except Exception as error:
        result = {"error": repr(error)[:2000]}
    found[name] = result
    Path(out).write_text(json.dumps(found))
    print(name, {k: v for k, v in result.items() if not k.startswith("answers")}, flush=True)
