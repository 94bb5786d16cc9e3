"""The words and signs around labs and topics, in both languages: headings, states, columns.

Terminal, page of a file and page of the server take them from here, so that a thing has one name. What a lab or a topic
says itself is in its own file; short labels of plots and tables are in `glossary.toml`.
"""

from cairn.labs.lab import Words

STATE_SIGNS = {"done": "●", "begun": "◐", "ready": "○", "later": "·"}  # of a topic
RUN_SIGNS = {"held": "✓", "off": "≠", "busy": "~", "failed": "✗", "skipped": "–"}  # of a lab's run

WORDS: dict[str, Words] = {
    # the states of a topic, and of a run
    "done": Words("done", "已完成"),
    "begun": Words("begun", "进行中"),
    "ready": Words("ready", "可以开始"),
    "later": Words("needs others first", "需先学其他"),
    "held": Words("as predicted", "与预测一致"),
    "off": Words("off", "有偏差"),
    "busy": Words("busy machine", "机器繁忙"),
    "failed": Words("failed", "出错"),
    "skipped": Words("skipped", "跳过"),
    # the map and the plans
    "title": Words("The roadmap", "学习路线"),
    "of": Words("topics done", "个主题已完成"),
    "months": Words("months {0}-{1}", "第 {0}–{1} 个月"),
    "next": Words("Next", "下一步"),
    "week": Words("Seven days", "七天计划"),
    "year": Words("Twelve months", "十二个月计划"),
    "back": Words("The map", "返回地图"),
    # a topic
    "problem": Words("Which problem it solves", "解决什么问题"),
    "debug": Words("How to see and debug it", "如何观察与调试"),
    "code": Words("The code here", "本项目中的代码"),
    "labs": Words("Labs", "实验"),
    "commands": Words("Commands", "命令"),
    "reading": Words("Reading", "延伸阅读"),
    "requires": Words("Learn first", "先修"),
    "ask": Words("Check yourself", "自测"),
    "picture": Words("The picture", "图示"),
    "worked": Words("Worked out", "推导与算例"),
    "snippet": Words("The lines that do it", "实现它的代码"),
    "asked": Words("Asked in interviews", "面试会问"),
    "answer": Words("Model answer", "参考答案"),
    "hidden": Words("--answers shows the answer", "加 --answers 查看参考答案"),
    # the quiz
    "question": Words("Question", "问题"),
    "evidence": Words("Measured on this machine", "本机实测"),
    "type an answer": Words("your answer (q stops): ", "你的回答（q 退出）："),
    "judge": Words("Did you have it? [y/n, q to stop] ", "答对了吗？[y/n，q 退出] "),
    # an exercise
    "exercises": Words("Exercises", "练习"),
    "minutes": Words("minutes", "分钟"),
    "skeleton": Words("Skeleton", "代码骨架"),
    "your code": Words("Your code", "你的代码"),
    "check it": Words("Check it", "评测"),
    "grading": Words("Your code is being graded ...", "正在评测……"),
    "reset": Words("Back to the skeleton", "恢复骨架"),
    "back to it": Words("Back", "返回"),
    "quiz": Words("Quiz", "测验"),
    "quiz note": Words(
        "Answers are graded by key facts and numbers, and kept: a topic is done when its labs have run and its "
        "question was answered.",
        "回答按要点与数字评分并保存：实验跑过且题目答对后，主题才算完成。",
    ),
    "other questions": Words("Other questions", "换一组题"),
    "had it": Words("I had it", "答对了"),
    "needs it": Words("Needed by", "后续"),
    "choose one": Words(
        "Choose a topic to see what it needs and what needs it.",
        "选择一个主题，查看它的先修与后续。",
    ),
    "open": Words("Open", "打开"),
    "graph": Words("Graph of topics", "主题依赖图"),
    "interview": Words("Interview", "面试"),
    "your answer": Words("Your answer", "你的回答"),
    "grade": Words("Grade it", "评分"),
    "has": Words("Has", "已答到"),
    "lacks": Words("Lacks", "缺少"),
    "follow-up": Words("Follow-up", "追问"),
    "wrote": Words("wrote", "已写入"),
    "then": Words("then", "然后运行"),
    "passed": Words("passed", "通过"),
    "not yet": Words("not yet", "尚未通过"),
    "hint": Words("Hint", "提示"),
    "mistakes": Words("Mistakes that people make", "常见错误"),
    "line": Words("line {0}", "第 {0} 行"),
    # a lab and its run
    "hypothesis": Words("Hypothesis", "假设"),
    "checks": Words("Checks", "检验"),
    "what": Words("what", "内容"),
    "predicted": Words("predicted", "预测"),
    "measured": Words("measured", "实测"),
    "simulated": Words("simulated", "模拟"),
    "your prediction": Words("Your prediction", "你的预测"),
    "predict first": Words("Predict first", "先预测"),
    "skip": Words("a number, or Enter to skip: ", "输入数字，直接回车跳过："),
    "why": Words("Why", "为什么"),
    "now try": Words("Now try", "接着试试"),
    "gap": Words("gap", "偏差"),
    "allowed": Words("allowed", "允许"),
    "verdict": Words("Verdict", "结论"),
    "calibrated": Words("machine.json is better by", "machine.json 已更新"),
    "questions": Words("Questions", "思考题"),
    "questions hidden": Words(
        "Questions (--answers shows the answers)", "思考题（--answers 显示答案）"
    ),
    "not run": Words("not run yet", "尚未运行"),
    "run here": Words("Run it here (quick form)", "在此运行（快速版）"),
    "running": Words("running", "运行中"),
    "run it": Words("Run it", "运行"),
    "cannot run": Words("lab '{lab}' cannot run here: {why}", "实验 '{lab}' 无法在本机运行：{why}"),
    "can run": Words(
        "`cairn lab list` marks the labs that this machine can run",
        "`cairn lab list` 标出本机可以运行的实验",
    ),
    "no runs": Words(
        "the lab record is empty; begin with: cairn lab run roofline",
        "实验记录为空；可以从 cairn lab run roofline 开始",
    ),
}
