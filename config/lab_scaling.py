# How does the loss fall with weights and with tokens? Four sizes, four lengths, and a law fitted to them (arXiv:2203.15556).
#   python bench.py config/lab.py config/lab_scaling.py --dataset=my_text.txt
what = 'scaling'
out_dir = 'out/lab_scaling'
seeds = 1
arms = '\n'.join(f'{n} x {C}, {steps} steps: --n_layer={n} --n_embd={C} --max_iters={steps} --warmup_iters={steps // 10}'
                 for n, C in ((1, 64), (2, 96), (4, 128), (6, 192)) for steps in (max_iters // 4, max_iters // 2, max_iters, max_iters * 2))
