question = 'How does the loss fall with weights and with tokens?'
# Trains four sizes for four lengths, and fits a law to the losses (arXiv:2203.15556).
#   python bench.py config/lab.py config/lab_scaling.py --dataset=my_text.txt
# Answer (AMD): the loss is 1300 / N^0.64 + 29 / D^0.18 + 0.27 for N matmul weights and D tokens, off by 1.2% (16 runs,
# seed 1). So few runs, with their noise, do not determine the constant.
what = 'scaling'
out_dir = 'out/lab_scaling'
picture = 'max_iters'
seeds = 1
variants = ''
for _layers, _width in ((1, 64), (2, 96), (4, 128), (6, 192)):
    for _steps in (max_iters // 4, max_iters // 2, max_iters, max_iters * 2):
        variants += (f'{_layers} x {_width}, {_steps} steps: --n_layer={_layers} --n_embd={_width} '
                     f'--max_iters={_steps} --warmup_iters={_steps // 10}\n')
