question = 'How high may the learning rate be?'
# From a rate that is far too low to one that is far too high, three seeds. A range test, `python bench.py
# config/lab.py --what=find_lr`, asks the same in one short run.
#   python bench.py config/lab.py config/lab_lr.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_lr'
picture = 'learning_rate'
variants = ''
for _rate in '5e-3 1e-4 3e-4 1e-3 3e-3 1e-2 2e-2 5e-2 1e-1 3e-1 1 10'.split():
    variants += f'rate {_rate}: --learning_rate={_rate}\n'
