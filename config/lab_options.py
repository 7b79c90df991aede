question = 'Weight decay, warm-up, clipping, dropout: what are they worth in a short run?'
# Changes one option at a time, and then three together, with three seeds.
#   python bench.py config/lab.py config/lab_options.py --dataset=my_text.txt
# Answer (AMD): in 300 steps, dropout costs 0.080. Warm-up, weight decay and clipping do nothing measurable (at most
# 0.016, with standard deviations of up to 0.016 over seeds).
what = 'compare'
out_dir = 'out/lab_options'
variants = f'''
as it is:
no weight decay: --weight_decay=0
weight decay 1: --weight_decay=1
no warm-up: --warmup_iters=0
half the run to warm up: --warmup_iters={max_iters // 2}
no clipping: --grad_clip=0
clipped at 0.1: --grad_clip=0.1
dropout 0.1: --dropout=0.1
no weight decay, no warm-up, no clipping: --weight_decay=0 --warmup_iters=0 --grad_clip=0
'''
