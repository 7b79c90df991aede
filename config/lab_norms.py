question = 'What are norms for, if a short run hardly needs them?'
# Tries longer runs, more layers and higher rates, with three seeds.
#   python bench.py config/lab.py config/lab_norms.py --dataset=my_text.txt
# Answer (AMD): without norms, a run of 300 steps ends 0.02 higher (config/lab_ablations.py). With norms, every rate
# from 1e-3 to 1e-1 trains (config/lab_lr.py). Without them, 2e-2 diverges with all three seeds and 1e-2 with one; at 8
# layers, 5e-3 diverges with two. At 3 times the steps, "no norm" costs 0.012.
what = 'compare'
out_dir = 'out/lab_norms'
_longer = f'--max_iters={3 * max_iters} --warmup_iters={3 * warmup_iters}'
variants = f'''
3 times as long: {_longer}
3 times as long, no norm: {_longer} config/ablate_no_norm.py
3 times as long, post-norm: {_longer} config/ablate_post_norm.py
twice the layers: --n_layer={2 * n_layer}
twice the layers, no norm: --n_layer={2 * n_layer} config/ablate_no_norm.py
twice the rate, no norm: --learning_rate={2 * learning_rate:g} config/ablate_no_norm.py
4 times the rate, no norm: --learning_rate={4 * learning_rate:g} config/ablate_no_norm.py
'''
