"""Reports on runs and evaluations: tables, plots and samples on one self-contained page.

``build_report(folder)`` reads every run and evaluation below a folder. ``write_report(report, file)`` writes an HTML
page that needs no other file. A report only reads: it computes no metric that a result file does not hold.
"""

from tandemrl.apps.report.page import Report as Report
from tandemrl.apps.report.page import build_report as build_report
from tandemrl.apps.report.page import headlines as headlines
from tandemrl.apps.report.page import write_report as write_report
from tandemrl.apps.report.records import ReportError as ReportError
from tandemrl.apps.report.records import read_results as read_results
