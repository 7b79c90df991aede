question = 'How does the loss fall with weights and with tokens?'
what = 'scaling'
out_dir = 'out/lab_plan'
picture = 'max_iters'
seeds = 1
eval_interval = 1_000_000   # only at the end
keep_checkpoints = 1
sample_tokens = 0
variants = ''
for _width in (64, 128, 256):
    for _steps in (500, 1000, 2000, 4000):
        if _width * _steps < 1_000_000:
            variants += (f'{_width} wide, {_steps} steps: --n_layer={_width // 64 + 1} --n_embd={_width} '
                         f'--n_head={_width // 32} --batch_size={_steps // 125} --max_iters={_steps}\n')
