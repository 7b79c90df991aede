"""
How fast, and how close to the limit, a training step is on this machine.

    python bench.py                                # the default model
    python bench.py config/train_gpt2.py --batch_size=32 --micro_batch_size=32
    torchrun --nproc_per_node=4 bench.py

It takes the knobs of train.py, trains on random tokens, and prints milliseconds, tokens/s, MFU and peak memory. MFU is
achieved over peak dense bf16 FLOP/s, counting 6 FLOPs per weight of a matmul and 12 n_layer n_embd T for attention per
token (no discount for the causal mask). Where the peak is not known it is the rate of the largest matmul measured here.
"""
import sys
import time

import torch

import train
from configurator import UserError, configure, launch
from model import GPT, GPTConfig

# -----------------------------------------------------------------------------
steps = 20              # measured optimizer steps
warmup_steps = 5        # steps before them
# -----------------------------------------------------------------------------
config = configure(globals(), vars(train))
train.config.update({k: config[k] for k in train.config})


def matmul_flops(place, dtype):
    """The largest rate of a square matmul on this device, in FLOP/s."""
    best, sizes = 0.0, (1024, 2048, 4096, 8192) if place.startswith('cuda') else (512, 1024, 2048)
    for n in sizes:
        a, b = torch.randn(n, n, device=place, dtype=dtype), torch.randn(n, n, device=place, dtype=dtype)
        for _ in range(5):
            train.synchronize(place)
            t = time.perf_counter()
            a @ b
            train.synchronize(place)
            best = max(best, 2 * n ** 3 / (time.perf_counter() - t))
    return best


def peak_memory(place):
    """The most memory that was in use, in bytes, and where."""
    if place.startswith('cuda'):
        return torch.cuda.max_memory_allocated(place), 'of the GPU'
    try:
        import resource
    except ImportError:         # Windows
        return 0, ''
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024), 'of the process'


def median(values):
    return sorted(values)[len(values) // 2]


def measure_step(model, fast, place, micro, grad_accum, world_size):
    """Seconds of each of `steps` optimizer steps, every one synchronised with the device."""
    c, params, optimizer = model.config, list(model.parameters()), train.make_optimizer(model)
    times = []
    for i in range(warmup_steps + steps):
        x = torch.randint(c.vocab_size, (grad_accum, micro, c.block_size + 1)).to(place)
        train.synchronize(place)
        t = time.perf_counter()
        for part in x:
            (fast(part[:, :-1], part[:, 1:])[1] / (grad_accum * world_size)).backward()
        if world_size > 1:
            train.sum_gradients(params, torch.zeros(2, device=place))
        train.clip_grad_norm(params, train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        train.synchronize(place)
        times.append(time.perf_counter() - t)
    return times[warmup_steps:]


def main():
    if steps < 1 or warmup_steps < 0:
        raise UserError('steps must be 1 or more and warmup_steps 0 or more')
    train.check_knobs()
    rank, local_rank, world_size = train.setup_ranks()
    place, why_place = train.choose_device(local_rank)
    type_, why_type = train.choose_dtype(place)
    compiled, why_compiled = train.choose_compile(place)
    micro, grad_accum = train.check_batch(world_size, place)
    train.connect(place, world_size)
    say = print if rank == 0 else lambda *args: None

    torch.manual_seed(train.seed)
    fields = {k: config[k] for k in GPTConfig.__dataclass_fields__ if k in config}
    if train.tokenizer == 'gpt2':
        fields['vocab_size'] = 50257
    model = GPT(GPTConfig(**fields)).to(place)
    model.compute_dtype = getattr(torch, type_)
    say(f'device  | {place} ({why_place})' + (f', {world_size} processes' if world_size > 1 else ''))
    say(f'dtype   | {type_} ({why_type}); compile {compiled} ({why_compiled})')
    say(f'model   | {model.num_params():,} parameters, vocabulary {model.config.vocab_size:,}, '
        f'{model.flops_per_token():.3g} FLOPs per token')
    tokens = train.batch_size * model.config.block_size
    say(f'batch   | {train.batch_size} x {model.config.block_size} = {tokens:,} tokens, {grad_accum} micro-batches of {micro}')

    seconds = median(measure_step(model, torch.compile(model) if compiled else model, place, micro, grad_accum, world_size))
    achieved = tokens / seconds * model.flops_per_token()
    peak, label = train.peak_flops(place) * world_size, 'MFU, of the published dense bf16 peak'
    if not peak:
        peak, label = matmul_flops(place, model.compute_dtype) * world_size, 'of the largest matmul rate measured here'
    memory, whose = peak_memory(place)
    say(f'step    | {1e3 * seconds:.1f} ms (median of {steps}), {tokens / seconds:,.0f} tokens/s')
    say(f'compute | {achieved / 1e12:.3g} TFLOP/s, {100 * achieved / peak:.1f}% {label} ({peak / 1e12:.3g} TFLOP/s)')
    say(f'memory  | {memory / 1e9:.2f} GB {whose} at most')
    train.leave(world_size)
    return dict(ms=1e3 * seconds, tokens_per_second=tokens / seconds, share_of_peak=achieved / peak)


if __name__ == '__main__':
    launch(main)
